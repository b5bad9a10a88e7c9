"""vLLM's entry point. vLLM calls it in every process, possibly several times, without a config."""

from kvpp_connect._log import get_logger

CONNECTORS = {
    "AscendStoreConnector": "kvpp_connect.connectors",
    "MooncakeConnectorV2": "kvpp_connect.connectors",
}


def register() -> None:
    """Put the configuration hook in place and make the connectors known by name."""
    from kvpp_connect.seam import ascend, install, multi, quirks

    quirks.apply()
    install.install_config_hook()
    if ascend.installed():
        # vllm-ascend's plugin registers names like ours. vLLM calls plugins in no fixed order, and
        # a name that is taken would make that plugin, and with it every start of vLLM, fail.
        get_logger(__name__).debug(
            'vllm-ascend is installed: connectors are there through kv_connector_module_path "%s"',
            multi.CONNECTOR_MODULE,
        )
        return
    _register_connectors()


def _register_connectors() -> None:
    from kvpp_connect.seam import api

    for name, module in CONNECTORS.items():
        if not api.register_connector(name, module):
            get_logger(__name__).debug(
                'connector name %s is taken; ours is there through kv_connector_module_path "%s"',
                name,
                module,
            )
