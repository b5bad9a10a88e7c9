class _NPUTaskGroupHandle:
    pass


from torch_npu._C import _distributed_c10d as _distributed_c10d  # noqa: E402
