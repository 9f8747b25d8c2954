"""The functions that transformers looks for under this name, from gristmill.engines.flash.kernels."""

from gristmill.engines.flash.kernels import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
