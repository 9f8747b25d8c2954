"""Who gets which GPUs: the plan, its text, and how workers travel to the jobs."""
