from __future__ import annotations

from pathlib import Path

import pytest

from fordstone.errors import ConfigError
from fordstone.spark.session.settings import MEANING, Surroundings, Wish, local_cores, settings, tasks_max, too_old

HERE = Surroundings(machine_cores=6, configured=False, log_file=Path("/a place/log4j2.properties"))
SUBMITTED = Surroundings(machine_cores=6, configured=True, log_file=None)
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def wish(config: dict[str, str] | None = None, **given) -> Wish:
    return Wish(config=config or {}, **given)


@pytest.mark.parametrize(
    ("asked", "where", "there", "absent"),
    [
        (
            wish(),
            HERE,
            {
                "spark.master": "local[6,2]",
                "spark.sql.shuffle.partitions": "6",
                "spark.driver.memory": "2g",
                "spark.app.name": "fordstone",
                **LOOPBACK,
            },
            ["spark.cores.max", "spark.executor.memory"],
        ),
        (wish(cores=3), HERE, {"spark.master": "local[3,2]", "spark.sql.shuffle.partitions": "3"}, []),
        (wish(master="local"), HERE, {"spark.sql.shuffle.partitions": "1", **LOOPBACK}, []),
        (wish(master="local[*]", memory="512m"), HERE, {"spark.driver.memory": "512m"}, ["spark.executor.memory"]),
        (
            wish(master="spark://far:7077", memory="4g", cores=200),
            HERE,
            {"spark.executor.memory": "4g", "spark.cores.max": "200", "spark.sql.shuffle.partitions": "128"},
            ["spark.driver.memory", *LOOPBACK],
        ),
        (wish(master="spark://127.0.0.1:7077"), HERE, LOOPBACK, ["spark.sql.shuffle.partitions"]),
        (wish(master="spark://127.0.0.1.example.org:7077"), HERE, {}, list(LOOPBACK)),
        (wish(), SUBMITTED, {}, ["spark.master", "spark.driver.memory", "spark.sql.shuffle.partitions", *LOOPBACK]),
        (
            wish({"spark.master": "local[2]"}),
            HERE,
            {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
            [],
        ),
        (wish(), HERE, {"spark.driver.maxResultSize": "512m"}, []),
        (wish(memory="8G"), HERE, {"spark.driver.maxResultSize": "2048m"}, []),
        (wish(memory="900k"), HERE, {"spark.driver.maxResultSize": "1m"}, []),
        (wish({"spark.driver.memory": "1t"}), SUBMITTED, {"spark.driver.maxResultSize": "262144m"}, []),
        (wish({"spark.driver.maxResultSize": "3g"}), HERE, {"spark.driver.maxResultSize": "3g"}, []),
        # Not known here: Spark has a default of its own, or the user's.
        (wish(memory="4g"), SUBMITTED, {"spark.executor.memory": "4g"}, ["spark.driver.maxResultSize"]),
        (wish({"spark.ui.enabled": "true"}), HERE, {"spark.ui.enabled": "true"}, []),
        (wish({"spark.sql.shuffle.partitions": "9"}), HERE, {"spark.sql.shuffle.partitions": "9"}, []),
    ],
)
def test_what_is_asked_for_and_where_gives_the_settings(asked, where, there, absent):
    chosen = settings(asked, where)
    assert {key: chosen.get(key) for key in there} == there
    assert [key for key in absent if key in chosen] == []
    assert MEANING.items() <= chosen.items()


@pytest.mark.parametrize("key", sorted(MEANING))
def test_a_setting_that_would_change_what_a_plan_means_is_refused(key):
    with pytest.raises(ConfigError, match="would change what a plan means"):
        settings(wish({key: "something else"}), HERE)
    assert settings(wish({key: MEANING[key].upper()}), HERE)[key] == MEANING[key].upper()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (wish(memory="2 gigabytes"), "not an amount of memory"),
        (wish(memory="0g"), "not an amount of memory"),
        (wish(cores=0), "must be at least 1"),
        (wish(master="local[4]", cores=2), "sets the number of cores"),
        (wish(log_level="LOUD"), "not a level of Spark's log"),
        (wish({"spark.master": "local[2]"}, master="local[4]"), "disagree"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_before_anything_starts(asked, said):
    with pytest.raises(ConfigError, match=said):
        settings(asked, HERE)


def test_the_users_java_options_come_last_and_a_log_file_with_spaces_stays_one_word():
    chosen = settings(wish({"spark.driver.extraJavaOptions": "-Xss2m"}, log_level="warn"), HERE)
    options = chosen["spark.driver.extraJavaOptions"]
    assert options.endswith(" -Xss2m")
    assert '"-Dlog4j2.configurationFile=file:///a%20place/log4j2.properties"' in options
    assert "-Dfordstone.log.level=warn" in options
    assert "log4j2" not in settings(wish(), SUBMITTED)["spark.driver.extraJavaOptions"]


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[2]", 2),
        ("local[ 3 , 4 ]", 3),
        ("local[*]", 6),
        ("local[*,2]", 6),
        ("local-cluster[2,1,512]", None),
        ("spark://local:7077", None),
        ("yarn", None),
        (None, None),
    ],
)
def test_a_local_master_says_how_many_tasks_it_runs_at_once(master, cores):
    assert local_cores(master, 6) == cores


@pytest.mark.parametrize(
    ("version", "old"),
    [("3.5.4", True), ("4.2.9", True), ("4.3.0", False), ("4.10.0-SNAPSHOT", False), ("5.0.0", False), ("?", True)],
)
def test_spark_before_4_3_is_too_old(version, old):
    assert too_old(version) is old


@pytest.mark.parametrize(
    ("conf", "tasks"),
    [
        ({}, 0),
        ({"spark.cores.max": "12"}, 12),
        ({"spark.executor.instances": "4", "spark.executor.cores": "8"}, 32),
        ({"spark.executor.instances": "4", "spark.executor.cores": "8", "spark.task.cpus": "4"}, 8),
        ({"spark.executor.instances": "2"}, 2),
        ({"spark.master": "yarn", "spark.executor.cores": "8"}, 16),
        ({"spark.master": "k8s://https://host:6443", "spark.executor.cores": "8"}, 16),
        ({"spark.master": "yarn", "spark.executor.instances": "3", "spark.executor.cores": "8"}, 24),
        ({"spark.master": "spark://host:7077", "spark.executor.cores": "8"}, 0),
        (
            {
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.maxExecutors": "10",
                "spark.executor.cores": "2",
            },
            20,
        ),
        ({"spark.dynamicAllocation.enabled": "true", "spark.executor.cores": "2"}, 64),
        ({"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "2147483647"}, 32),
        ({"spark.dynamicAllocation.enabled": "false", "spark.dynamicAllocation.maxExecutors": "10"}, 0),
        ({"spark.cores.max": "6", "spark.executor.instances": "2", "spark.executor.cores": "1"}, 6),
    ],
)
def test_shards_are_as_many_as_the_tasks_that_the_application_may_grow_to(conf: dict[str, str], tasks: int):
    assert tasks_max(conf) == tasks
