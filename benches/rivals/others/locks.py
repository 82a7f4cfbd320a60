"""redis-py's and kazoo's locks, told what to do by `src/worker.rs`."""

import os
import sys
import threading
import time


def fail(error):
    # On whatever thread: the reason is the answer.
    print(f"error: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    os._exit(1)


threading.excepthook = lambda arguments: fail(arguments.exc_value)
sys.excepthook = lambda kind, error, trace: fail(error)

from importlib.metadata import version

TTL = 10
rival, port = sys.argv[1], int(sys.argv[2])

# Each has a client for each contender, as in a process of its own.
if rival == "redis-py":
    import redis

    PACKAGE, SETTING = "redis", "defaults: looks again every 100 ms"

    def lock(mutex):
        return redis.Redis(host="127.0.0.1", port=port).lock("redis-py-" + mutex, timeout=TTL)

else:
    from kazoo.client import KazooClient

    PACKAGE, SETTING = "kazoo", "defaults: watches the node before its own"

    def lock(mutex):
        client = KazooClient(hosts=f"127.0.0.1:{port}", timeout=TTL)
        client.start()
        return client.Lock("/kazoo-" + mutex)


def answer(numbers):
    print(" ".join(str(number) for number in numbers), flush=True)


def cycles(count):
    alone = lock("alone")
    took = []
    for _ in range(count + 1):
        began = time.perf_counter()
        alone.acquire()
        alone.release()
        took.append((time.perf_counter() - began) * 1e6)
    return took[1:]


def hand_offs(holds):
    owner, waiter = lock("handed-over"), lock("handed-over")
    took = []
    for hold in holds:
        owner.acquire()
        had = []

        def wait():
            waiter.acquire()
            had.append(time.perf_counter())
            waiter.release()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(hold / 1e6)
        began = time.perf_counter()
        owner.release()
        thread.join()
        took.append((had[0] - began) * 1e6)
    return took


def eight(settle, seconds):
    counting, over = threading.Event(), threading.Event()
    start = threading.Barrier(9)
    counts = [0] * 8

    def cycle(number):
        contender = lock("eight")
        start.wait()
        while not over.is_set():
            contender.acquire()
            if counting.is_set():
                counts[number] += 1
            contender.release()

    threads = [threading.Thread(target=cycle, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    time.sleep(settle)
    counting.set()
    time.sleep(seconds)
    counting.clear()
    over.set()
    for thread in threads:
        thread.join()
    return counts


print(version(PACKAGE), SETTING, sep="\t", flush=True)
for line in sys.stdin:
    order, *arguments = line.split()
    if order == "cycles":
        answer(cycles(int(arguments[0])))
    elif order == "handoffs":
        answer(hand_offs([int(hold) for hold in arguments]))
    elif order == "eight":
        answer(eight(*map(float, arguments)))
