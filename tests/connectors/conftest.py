import pytest

# Before anything imports them: the suites' assertions then say what they compared.
pytest.register_assert_rewrite("fordstone.testing.contracts.connector")
