import pytest
from processes import Child


@pytest.fixture
def spawn():
    """Starts processes that are gone after the test."""
    children = []

    def start(function, *arguments):
        children.append(Child(function, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()
