"""The functions that transformers looks for under this name, from gristmill.engines.continuous.flash.kernels."""

from gristmill.engines.continuous.flash.kernels import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
