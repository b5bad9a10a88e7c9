class ProcessGroupHCCL:
    class Options:
        def __init__(self, *args, **kwargs):
            del args, kwargs
            self.hccl_config = {}
