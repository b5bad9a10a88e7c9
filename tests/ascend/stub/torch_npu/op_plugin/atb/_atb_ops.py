def _register_atb_extensions():
    return
