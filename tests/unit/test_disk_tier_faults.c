/* A disk that is full, and files that may not be written: misses, one warning, and all is well
 * again once it can be. Each test has a process of its own, whose limits and rights it may lose. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/mem.h"
#include "engine/offload/disk_block.h"
#include "tests/unit/disk_rig.h"

enum { SKIPPED = 77, NOBODY = 65534 };

static char dir[64];

/* The exit status of the child is its verdict; what it logged lies in log_path. */
static void run_apart(int (*body)(const kv_region *r, disk_tier_opts *opts), const char *warning)
{
    char log_path[] = "/var/tmp/disk_faults_log.XXXXXX";
    char *text;
    size_t n_bytes;
    int n_lines = 0;
    int status;
    (void)snprintf(dir, sizeof(dir), "/var/tmp/disk_faults.XXXXXX");
    disk_rig_make_dir(dir);
    int fd = mkstemp(log_path);
    pid_t pid = fork();
    if (pid == 0) {
        kv_region r;
        disk_rig_region(&r, 4);
        disk_tier_opts opts = disk_rig_opts(dir, &r, 1000);
        dup2(fd, STDERR_FILENO);
        log_set_level(LOG_WARN);
        _exit(body(&r, &opts));
    }
    close(fd);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(file_read(&text, &n_bytes, log_path, 1 << 20, NULL), PGD_OK);
    disk_rig_remove_dir(dir);
    unlink(log_path);
    if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) {
        mem_free(text);
        skip();
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("%s", text);
    for (const char *at = text; (at = strstr(at, "\n")) != NULL; at++)
        n_lines++;
    if (n_lines != 1 || strstr(text, warning) == NULL)
        fail_msg("expected \"%s\" and no more, got: %s", warning, text);
    mem_free(text);
}

static void write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY);
    if (fd >= 0) {
        (void)!write(fd, text, strlen(text));
        close(fd);
    }
}

/* A small file system of its own, as root or in a user namespace. */
static bool mount_small(const char *options)
{
    char map[64];
    unsigned uid = geteuid();
    unsigned gid = getegid();
    if (unshare(CLONE_NEWNS) != 0) {
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
            return false;
        write_text("/proc/self/setgroups", "deny");
        (void)snprintf(map, sizeof(map), "0 %u 1", uid);
        write_text("/proc/self/uid_map", map);
        (void)snprintf(map, sizeof(map), "0 %u 1", gid);
        write_text("/proc/self/gid_map", map);
    }
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("disk_faults", dir, "tmpfs", 0, options) == 0;
}

/* Until it fails; the number of writes that did not. Those on disk can be read all the while. */
static int32_t write_until_fault(disk_tier *d, const kv_region *r, int32_t from)
{
    int32_t n = from;
    while (n < 500 && disk_rig_write(d, r, n))
        n++;
    PGD_ASSERT(n < 500);
    offload_key key = disk_rig_key(n);
    PGD_ASSERT(!disk_tier_write(d, &key, 0, 0)); /* it rests */
    PGD_ASSERT(!disk_rig_has(d, n));
    for (int32_t i = from; i < n; i++)
        PGD_ASSERT(disk_rig_has(d, i) && disk_rig_read(d, r, i));
    return n - from;
}

static void expect_recovery(disk_tier *d, const kv_region *r, int32_t number)
{
    usleep(400000); /* longer than it rests */
    PGD_ASSERT(disk_rig_write(d, r, number));
    PGD_ASSERT(disk_rig_read(d, r, number));
    disk_rig_sum sum = disk_rig_sum_files(dir);
    PGD_ASSERT(sum.n_temps == 0 && sum.account == sum.n_bytes);
}

/* A file of others' on the small file system; its size is n_bytes. */
static int open_other(off_t n_bytes)
{
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/lost+found", dir);
    PGD_ASSERT(mkdir(path, 0700) == 0 || errno == EEXIST);
    (void)snprintf(path, sizeof(path), "%s/lost+found/other", dir);
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    PGD_ASSERT(fd >= 0 && posix_fallocate(fd, 0, n_bytes) == 0);
    return fd;
}

static int32_t count_blocks(disk_tier *d, const kv_region *r, int32_t end)
{
    int32_t n = 0;
    for (int32_t i = 0; i < end; i++) {
        PGD_ASSERT(!disk_rig_has(d, i) || disk_rig_read(d, r, i));
        n += disk_rig_has(d, i);
    }
    disk_rig_sum sum = disk_rig_sum_files(dir);
    PGD_ASSERT(sum.n_blocks == n && sum.n_temps == 0 && sum.account == sum.n_bytes);
    return n;
}

/* Half of it is others': what fits in the other half is kept, the least recently used goes for what
 * comes, and with more room more is kept. */
static int fill_disk(const kv_region *r, disk_tier_opts *opts)
{
    if (!mount_small("size=1m,mode=0700"))
        return SKIPPED;
    int fd = open_other(512 << 10);
    disk_tier *d = disk_rig_open(opts);
    for (int32_t i = 0; i < 100; i++) {
        PGD_ASSERT(disk_rig_write(d, r, i));
        PGD_ASSERT(disk_rig_read(d, r, i));
        disk_rig_touch(d, 0); /* stays */
    }
    int32_t n = count_blocks(d, r, 100);
    PGD_ASSERT(n >= 20 && n <= 32 && disk_rig_has(d, 0));
    for (int32_t i = 101 - n; i < 100; i++)
        PGD_ASSERT(disk_rig_has(d, i));
    PGD_ASSERT(ftruncate(fd, 0) == 0);
    usleep(400000); /* longer than it keeps to that */
    for (int32_t i = 100; i < 120; i++)
        PGD_ASSERT(disk_rig_write(d, r, i));
    PGD_ASSERT(count_blocks(d, r, 120) == n + 20);
    for (int32_t i = 120; i < 200; i++)
        PGD_ASSERT(disk_rig_write(d, r, i));
    PGD_ASSERT(count_blocks(d, r, 200) >= 50);
    return disk_tier_destroy(d) ? 0 : 1;
}

/* With nothing to give up there is nothing to be done, until there is space. */
static int fill_disk_before(const kv_region *r, disk_tier_opts *opts)
{
    if (!mount_small("size=1m,mode=0700"))
        return SKIPPED;
    disk_tier *d = disk_rig_open(opts);
    PGD_ASSERT(disk_rig_write(d, r, 0) && disk_rig_remove(d, 0));
    struct statvfs fs;
    PGD_ASSERT(statvfs(dir, &fs) == 0);
    int fd = open_other((off_t)(fs.f_bavail * fs.f_frsize));
    PGD_ASSERT(write_until_fault(d, r, 1) == 0);
    usleep(400000);
    PGD_ASSERT(!disk_rig_write(d, r, 100)); /* still full: no second warning */
    PGD_ASSERT(disk_rig_stats(d).n_evicted == 0);
    PGD_ASSERT(ftruncate(fd, 0) == 0);
    expect_recovery(d, r, 200);
    return disk_tier_destroy(d) ? 0 : 1;
}

/* Second names for all blocks, as a snapshot of the file system would keep them; or none any more. */
static void keep_blocks(int32_t end, bool keep)
{
    for (int32_t i = 0; i < end; i++) {
        char path[DISK_RIG_PATH_BYTES];
        char name[128];
        disk_rig_path(path, dir, i);
        (void)snprintf(name, sizeof(name), "%s/lost+found/%d", dir, i);
        PGD_ASSERT(keep ? link(path, name) == 0 : unlink(name) == 0);
    }
}

/* Where giving up blocks makes no room few are given up, and what is left can be read all the while. */
static int give_up_in_vain(const kv_region *r, disk_tier_opts *opts)
{
    if (!mount_small("size=1m,mode=0700"))
        return SKIPPED;
    opts->rest_ms = 100;
    disk_tier *d = disk_rig_open(opts);
    for (int32_t i = 0; i < 40; i++)
        PGD_ASSERT(disk_rig_write(d, r, i));
    struct statvfs fs;
    PGD_ASSERT(statvfs(dir, &fs) == 0);
    int fd = open_other((off_t)(fs.f_bavail * fs.f_frsize));
    keep_blocks(40, true);
    uint64_t end_us = clock_now_us() + 2500000;
    for (int32_t i = 40; clock_now_us() < end_us; i++) {
        PGD_ASSERT(!disk_rig_write(d, r, i));
        usleep(1000);
    }
    /* Two at 0, 200, 600 and 1400 ms. */
    uint64_t n_evicted = disk_rig_stats(d).n_evicted;
    PGD_ASSERTF(n_evicted >= 2 && n_evicted <= 8, "%d given up", (int)n_evicted);
    PGD_ASSERT(count_blocks(d, r, 40) == 40 - (int32_t)n_evicted);
    keep_blocks(40, false);
    for (int32_t i = 0; i < 600 && !disk_rig_write(d, r, 1000); i++)
        usleep(10000); /* it rests for up to 1.6 s */
    PGD_ASSERT(disk_rig_read(d, r, 1000));
    PGD_ASSERT(disk_rig_write(d, r, 1001));
    PGD_ASSERT(disk_rig_stats(d).n_evicted == n_evicted);
    close(fd);
    return disk_tier_destroy(d) ? 0 : 1;
}

static int limit_files(const kv_region *r, disk_tier_opts *opts)
{
    struct rlimit old;
    struct rlimit less;
    PGD_ASSERT(getrlimit(RLIMIT_FSIZE, &old) == 0);
    less = old;
    less.rlim_cur = 8192;
    disk_tier *d = disk_rig_open(opts);
    PGD_ASSERT(disk_rig_write(d, r, 0));
    PGD_ASSERT(setrlimit(RLIMIT_FSIZE, &less) == 0);
    PGD_ASSERT(write_until_fault(d, r, 1) == 0);
    PGD_ASSERT(disk_rig_read(d, r, 0));
    PGD_ASSERT(setrlimit(RLIMIT_FSIZE, &old) == 0);
    expect_recovery(d, r, 200);
    return disk_tier_destroy(d) ? 0 : 1;
}

static int take_rights(const kv_region *r, disk_tier_opts *opts)
{
    char path[128];
    if (geteuid() == 0 &&
        (chown(dir, NOBODY, NOBODY) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0))
        return SKIPPED;
    disk_tier *d = disk_rig_open(opts);
    PGD_ASSERT(disk_rig_write(d, r, 0));
    (void)snprintf(path, sizeof(path), "%s/tmp", dir);
    PGD_ASSERT(chmod(path, 0500) == 0);
    PGD_ASSERT(write_until_fault(d, r, 1) == 0);
    PGD_ASSERT(disk_rig_read(d, r, 0));
    PGD_ASSERT(chmod(path, 0700) == 0);
    expect_recovery(d, r, 200);
    return disk_tier_destroy(d) ? 0 : 1;
}

/* Reads rest as well, and lookups miss meanwhile. */
static int take_reading(const kv_region *r, disk_tier_opts *opts)
{
    char path[128];
    offload_key key = disk_rig_key(0);
    if (geteuid() == 0 &&
        (chown(dir, NOBODY, NOBODY) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0))
        return SKIPPED;
    disk_tier *d = disk_rig_open(opts);
    for (int32_t i = 0; i < 5; i++)
        PGD_ASSERT(disk_rig_write(d, r, i));
    (void)snprintf(path, sizeof(path), "%s/%02x", dir, key.hash.bytes[0]);
    PGD_ASSERT(chmod(path, 0300) == 0);
    PGD_ASSERT(!disk_rig_read(d, r, 0));
    for (int32_t i = 0; i < 5; i++)
        PGD_ASSERT(!disk_rig_has(d, i) && !disk_rig_read(d, r, i));
    PGD_ASSERT(chmod(path, 0700) == 0);
    usleep(400000);
    for (int32_t i = 1; i < 5; i++)
        PGD_ASSERT(disk_rig_has(d, i) && disk_rig_read(d, r, i));
    return disk_tier_destroy(d) ? 0 : 1;
}

/* What cannot be removed is told as not removed, and is as soon as it can be; nor does it matter that
 * writes rest meanwhile. */
static int take_removing(const kv_region *r, disk_tier_opts *opts)
{
    char path[128];
    char temps[128];
    offload_key key = disk_rig_key(0);
    opts->rest_ms = 60000;
    if (geteuid() == 0 &&
        (chown(dir, NOBODY, NOBODY) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0))
        return SKIPPED;
    disk_tier *d = disk_rig_open(opts);
    for (int32_t i = 0; i < 2; i++)
        PGD_ASSERT(disk_rig_write(d, r, i));
    (void)snprintf(temps, sizeof(temps), "%s/tmp", dir);
    PGD_ASSERT(chmod(temps, 0500) == 0);
    PGD_ASSERT(!disk_rig_write(d, r, 2));
    PGD_ASSERT(disk_rig_remove(d, 1));
    (void)snprintf(path, sizeof(path), "%s/%02x", dir, key.hash.bytes[0]);
    PGD_ASSERT(chmod(path, 0500) == 0);
    PGD_ASSERT(!disk_rig_remove(d, 0) && !disk_rig_remove(d, 0));
    PGD_ASSERT(disk_rig_has(d, 0) && disk_rig_stats(d).n_failed_removals == 2);
    PGD_ASSERT(chmod(path, 0700) == 0 && chmod(temps, 0700) == 0);
    PGD_ASSERT(disk_rig_remove(d, 0));
    PGD_ASSERT(!disk_rig_has(d, 0) && disk_rig_sum_files(dir).account == 0);
    return disk_tier_destroy(d) ? 0 : 1;
}

/* Files of others, as a careless copy leaves them: none of them holds up the rest, and all of them go. */
static int take_files(const kv_region *r, disk_tier_opts *opts)
{
    char path[256];
    char folder[DISK_BLOCK_FOLDER_BYTES];
    char name[DISK_BLOCK_NAME_BYTES];
    if (geteuid() == 0 &&
        (chown(dir, NOBODY, NOBODY) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0))
        return SKIPPED;
    disk_tier *d = disk_rig_open(opts);
    for (int32_t i = 0; i < 6; i++)
        PGD_ASSERT(disk_rig_write(d, r, i));
    for (int32_t i = 0; i < 6; i += 2) {
        disk_block_id id = {.key = disk_rig_key(i), .model = disk_block_model(opts->fingerprint)};
        disk_block_folder(folder, &id);
        disk_block_name(name, &id);
        (void)snprintf(path, sizeof(path), "%s/%s/%s", dir, folder, name);
        PGD_ASSERT(chmod(path, 0) == 0);
    }
    for (int32_t i = 0; i < 6; i++)
        PGD_ASSERT(disk_rig_read(d, r, i) == (i % 2 == 1));
    for (int32_t i = 0; i < 6; i += 2)
        PGD_ASSERT(disk_rig_write(d, r, i) && disk_rig_read(d, r, i));
    disk_rig_sum sum = disk_rig_sum_files(dir);
    PGD_ASSERT(sum.account == sum.n_bytes && sum.n_bytes == 6 * DISK_RIG_FILE_BYTES);
    return disk_tier_destroy(d) ? 0 : 1;
}

static void test_disk_tier_full_disk(void **state)
{
    (void)state;
    run_apart(fill_disk, "cannot write a block without giving up others: No space left");
}

static void test_disk_tier_full_disk_before(void **state)
{
    (void)state;
    run_apart(fill_disk_before, "cannot write a block, none is written for a while: No space left");
}

static void test_disk_tier_gives_up_few_in_vain(void **state)
{
    (void)state;
    run_apart(give_up_in_vain, "cannot write a block without giving up others: No space left");
}

static void test_disk_tier_file_limit(void **state)
{
    (void)state;
    run_apart(limit_files, "cannot write a block");
}

static void test_disk_tier_no_right_to_write(void **state)
{
    (void)state;
    run_apart(take_rights, "cannot write a block");
}

static void test_disk_tier_no_right_to_read(void **state)
{
    (void)state;
    run_apart(take_reading, "cannot read a block");
}

static void test_disk_tier_no_right_to_remove(void **state)
{
    (void)state;
    run_apart(take_removing,
              "cannot write a block, none"); /* one for both: the rights are missing */
}

static void test_disk_tier_no_right_to_files(void **state)
{
    (void)state;
    run_apart(take_files, "torn or foreign block removed");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_disk_tier_full_disk),
                                       cmocka_unit_test(test_disk_tier_full_disk_before),
                                       cmocka_unit_test(test_disk_tier_gives_up_few_in_vain),
                                       cmocka_unit_test(test_disk_tier_file_limit),
                                       cmocka_unit_test(test_disk_tier_no_right_to_write),
                                       cmocka_unit_test(test_disk_tier_no_right_to_read),
                                       cmocka_unit_test(test_disk_tier_no_right_to_remove),
                                       cmocka_unit_test(test_disk_tier_no_right_to_files)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
