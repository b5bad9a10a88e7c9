import pytest


@pytest.fixture
def ranks(spawn):
    """Two prefill ranks with two layers each, and what they tell of themselves."""
    from pull_nodes import producer_rank

    children = [spawn(producer_rank, rank, layers) for rank, layers in enumerate([[0, 1], [2, 3]])]
    return children, [child.get() for child in children]


@pytest.fixture
def make_producer(ranks):
    """Makes scheduler sides of the prefill node."""
    from pull_nodes import SHAPE, describe_group

    from kvpp_connect.connectors.mooncake_v2.producer import Producer

    made = []

    def make(lease_s=60.0, port=0, num_blocks=SHAPE.num_blocks):
        producer = Producer(engine_id="p", host="127.0.0.1", port=port, lease_s=lease_s)
        producer.publish(describe_group(*ranks[1], num_blocks=num_blocks))
        made.append(producer)
        return producer

    yield make
    for producer in made:
        producer.close()
