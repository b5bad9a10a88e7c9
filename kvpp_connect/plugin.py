"""vLLM's entry point. vLLM calls it in every process, possibly several times, without a config."""

from kvpp_connect._log import get_logger

CONNECTORS = {
    "AscendStoreConnector": "kvpp_connect.connectors",
    "MooncakeConnectorV2": "kvpp_connect.connectors",
}


def register() -> None:
    """Put the configuration hook in place and make the connectors known by name."""
    from kvpp_connect.seam import api, install, quirks

    quirks.apply()
    install.install_config_hook()
    for name, module in CONNECTORS.items():
        if not api.register_connector(name, module):
            get_logger(__name__).debug(
                'connector name %s is taken; ours is there through kv_connector_module_path "%s"',
                name,
                module,
            )
