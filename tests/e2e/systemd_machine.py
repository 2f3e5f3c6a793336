"""A real systemd as PID 1 in namespaces of its own: the root file system is an overlay that vanishes with it, the network is an empty one."""
import json
import os
import shutil
import subprocess
import sys
import time

import pytest

# Runs inside the new namespaces; $1 = scratch folder, $2 = an installed tree to put on top of /.
BOOT = r"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cp -a "$2/." "$1/root/"
cd "$1/root"
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs tmpfs dev # of its own: tmpfiles changes what it finds there
for node in null zero full random urandom tty; do
    touch dev/$node
    mount --bind /dev/$node dev/$node
done
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t sysfs -o ro sysfs sys
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
else
    mount -t tmpfs tmpfs sys/fs/cgroup
    mkdir sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
fi
# Only what the tests want is booted: the journal, and the targets that every unit needs.
rm -rf etc/systemd/system etc/machine-id
mkdir -p etc/systemd/system
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-logind.service \
    getty.target dev-mqueue.mount dev-hugepages.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount \
    sys-fs-fuse-connections.mount systemd-modules-load.service systemd-sysctl.service systemd-random-seed.service systemd-remount-fs.service \
    swap.target ldconfig.service systemd-update-utmp.service systemd-machine-id-commit.service network-online.target; do
    ln -s /dev/null etc/systemd/system/$unit
done
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n' > etc/systemd/system/test.target
echo 0123456789abcdef0123456789abcdef > etc/machine-id
mkdir old
pivot_root . old
umount -l /old
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=test.target --log-target=console --show-status=0
"""

HTTP = """
import json, socket, sys, http.client
method, path, body, key = json.loads(sys.argv[1])
conn = http.client.HTTPConnection("127.0.0.1", 8000, timeout=30)
conn.request(method, path, json.dumps(body) if body else None, {"X-Api-Key": key} if key else {})
response = conn.getresponse()
print(json.dumps([response.status, response.read().decode()]))
"""

NETWORK_UP = """
import fcntl, socket, struct
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
"""


class Machine:
    def __init__(self, tmp_path, installed):
        for tool in ("unshare", "nsenter", "/lib/systemd/systemd", "systemctl", "pgrep"):
            if not shutil.which(tool):
                pytest.skip(f"{tool} is not installed")
        if os.geteuid() != 0:
            pytest.skip("only root can make the namespaces")
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        self.cgroup = None
        parent = "/sys/fs/cgroup" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "/sys/fs/cgroup/systemd"
        try:  # a group of its own, so that the namespace shows nobody else's processes
            os.mkdir(f"{parent}/paged-test-{os.getpid()}")
            self.cgroup = f"{parent}/paged-test-{os.getpid()}"
        except OSError as e:
            pytest.skip(f"no control group: {e}")
        self.log_path = tmp_path / "boot.log"
        boot = f"echo $$ > {self.cgroup}/cgroup.procs && exec unshare -m -p -C -i -u -n --fork --kill-child sh -c '{{ boot=$1; shift; eval \"$boot\"; }}' boot \"$@\""
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(["sh", "-c", boot, "sh", BOOT, scratch, installed], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, start_new_session=True)
        self.pid = None
        end = time.monotonic() + 20
        while not self.is_up():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                pytest.skip(f"systemd does not run here: {self.log_path.read_text()[-300:]}")
            time.sleep(0.1)
        self.run(sys.executable, "-c", NETWORK_UP)

    def is_up(self):
        children = subprocess.run(["pgrep", "-P", str(self.process.pid), "systemd"], capture_output=True, text=True).stdout.split()
        if not children:
            return False
        self.pid = children[0]
        return self.run("systemctl", "is-active", "test.target", check=False).strip() == "active"

    def run(self, *command, check=True):
        out = subprocess.run(["nsenter", "-t", self.pid, "-m", "-p", "-C", "-i", "-u", "-n", "-r", "-w", *map(str, command)],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
        assert not check or out.returncode == 0, f"{command}: {out.stdout}\n{self.journal()}"
        return out.stdout

    def journal(self, *options):
        return self.run("journalctl", "--no-pager", "-u", "paged", *options, check=False)

    def show(self, unit, name):
        return self.run("systemctl", "show", unit, "--value", "-p", name).strip()

    def write(self, path, text, mode=0o644, group=None):
        self.run(sys.executable, "-c", "import os, shutil, sys\nos.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)\n"
                 "open(sys.argv[1], 'w').write(sys.argv[2])\nos.chmod(sys.argv[1], int(sys.argv[3]))\n"
                 "sys.argv[4] and shutil.chown(sys.argv[1], group=sys.argv[4])", path, text, mode, group or "")

    def ask(self, method, path, body=None, key=None):
        """(status, text of the answer)"""
        return tuple(json.loads(self.run(sys.executable, "-c", HTTP, json.dumps([method, path, body, key]))))

    def stop(self):
        """Killing PID 1 of the namespace ends everything in it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end = time.monotonic() + 10
        while self.cgroup and os.path.exists(self.cgroup) and time.monotonic() < end:
            for folder, _, _ in os.walk(self.cgroup, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    time.sleep(0.05)  # not empty yet
