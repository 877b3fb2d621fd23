"""Ending a process around threads that cannot be ended."""

from __future__ import annotations

import subprocess
import sys

from fordstone.spark.session.session import describe_failure, worker_trace

STREAM = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] Reason: Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/fordstone/spark/hosted/source.py", line 159, in _push
    chain.push(frame, late=False)
  File "/env/lib/python3.11/site-packages/fordstone/operators/rowwise.py", line 120, in apply
    given = self._function(record)
            ^^^^^^^^^^^^^^^^^^^^^^
  File "/var/spark-1/userFiles-2/flow-2e868d.zip/flow.py", line 5, in warm
    return half(row["tmep"])
                ~~~^^^^^^^^
  File "/env/lib/python3.11/json/decoder.py", line 1, in decode
    raise
  File "/srv/beside.py", line 2, in half
    return x / 2
KeyError: 'tmep'
in step map, on a batch of 2 rows with columns device, temp
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: fordstone bad [id = 1, runId = 2]
Logical Plan:
   +- LocalRelation <empty>
"""


def test_the_innermost_traceback_counts_with_the_frames_of_the_users_code():
    trace = worker_trace(STREAM)
    assert trace is not None
    assert trace.frames == (
        '  File "flow.py", line 5, in warm\n    return half(row["tmep"])\n                ~~~^^^^^^^^',
        '  File "/srv/beside.py", line 2, in half\n    return x / 2',
    )
    assert trace.raised == "KeyError: 'tmep'\nin step map, on a batch of 2 rows with columns device, temp"
    assert str(trace).endswith("return x / 2\n" + trace.raised)


def test_a_failure_of_ours_has_no_frames_of_the_user():
    trace = worker_trace(
        STREAM.replace("/var/spark-1/userFiles-2/flow-2e868d.zip/flow.py", "/x/fordstone/edge/engine/task.py").replace(
            "/srv/", "/x/lib/python3.11/"
        )
    )
    assert trace is not None
    assert trace.frames == ()


def test_the_last_words_are_one_line():
    assert describe_failure(STREAM) == "KeyError: 'tmep' in step map, on a batch of 2 rows with columns device, temp"
    assert describe_failure("Job aborted.\n\tat org.apache.spark.X\n") == "Job aborted."
    assert describe_failure("\n\tat org.apache.spark.X\nlost executor 3\n") == "lost executor 3"
    assert describe_failure("") == ""


def test_text_without_or_with_half_a_traceback_has_no_trace():
    assert worker_trace("Job aborted due to stage failure.") is None
    assert worker_trace('Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()') is None
    assert worker_trace("Traceback (most recent call last):") is None


def test_the_stack_of_java_is_not_part_of_what_was_raised():
    trace = worker_trace(
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no\n\n\tat org.x.Y(Z.scala:1)\n'
    )
    assert trace is not None
    assert (trace.frames, trace.raised) == (('  File "x.py", line 1, in f',), "ValueError: no")


IN_JAVA = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Reason: Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/py4j/protocol.py", line 327, in get_return_value
    raise Py4JJavaError(
py4j.protocol.Py4JJavaError: An error occurred while calling o1049.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:53)
Caused by: org.apache.spark.SparkException: [CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state.  SQLSTATE: 58030
\tat org.apache.spark.sql.execution.streaming.X.load(X.scala:1)
Caused by: java.io.EOFException: Stream ended prematurely
\t... 12 more

 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
"""


def test_the_last_words_of_a_failure_in_java_are_the_cause_that_spark_names():
    assert (
        describe_failure(IN_JAVA) == "[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state."
    )
    unnamed = IN_JAVA.replace("[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] ", "")
    assert describe_failure(unnamed) == "Stream ended prematurely"
    aborted = IN_JAVA.partition("\tat")[0].replace("Exception thrown in awaitResult:", "Job aborted: lost executor 3")
    assert describe_failure(aborted) == "Job aborted: lost executor 3"
    silent = IN_JAVA.partition(": org.apache")[0]
    assert describe_failure(silent) == "py4j.protocol.Py4JJavaError: An error occurred while calling o1049.getResult."


PROGRAM = """
import atexit, sys, threading, time
from fordstone.spark.run import leave
atexit.register(lambda: sys.stdout.write("tidied"))
threading.Thread(target=time.sleep, args=(600,)).start()
leave(3)
"""


def test_a_process_leaves_with_its_code_and_tidied_up_whatever_its_threads_do() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "tidied", "")
