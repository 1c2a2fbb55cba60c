"""An Ethernet switch that keeps every frame for a while: a link's delay, for kernels without netem.

    delay_line.py DELAY_SECONDS CUT_FILE TAP...

Makes the TAP devices, prints `ready`, and passes frames between them, each after the delay. Ports whose numbers are in
CUT_FILE lose all frames; it is read again on SIGHUP. Ends on SIGTERM, and the devices with it.
"""

import collections
import fcntl
import os
import select
import signal
import struct
import sys
import time

TUNSETIFF, TAP, NO_HEADER = 0x400454CA, 0x0002, 0x1000


def tap(name):
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), TAP | NO_HEADER))
    return fd


def main():
    delay, cut_file, names = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ports = [tap(name) for name in names]
    number = {fd: i for i, fd in enumerate(ports)}
    cut, where, line = set(), {}, collections.deque()

    def read_cut(*_):
        cut.clear()
        if os.path.exists(cut_file):
            cut.update(int(word) for word in open(cut_file).read().split())

    signal.signal(signal.SIGHUP, read_cut)
    print("ready", flush=True)
    clock = time.monotonic
    while True:
        wait = max(0.0, line[0][0] - clock()) if line else None
        for fd in select.select(ports, [], [], wait)[0]:
            for _ in range(64):  # as many as are there, but not for ever
                try:
                    frame = os.read(fd, 70000)
                except OSError:
                    break
                where[frame[6:12]] = fd
                line.append((clock() + delay, fd, frame))
        now = clock()
        while line and line[0][0] <= now:
            _, source, frame = line.popleft()
            known = where.get(frame[:6])
            for fd in [known] if known is not None else ports:
                if fd != source and number[fd] not in cut and number[source] not in cut:
                    try:
                        os.write(fd, frame)
                    except OSError:
                        pass  # a device that is down, or full: the frame is lost, as on a wire


main()
