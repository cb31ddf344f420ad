/* Preloaded into a process: the n-th call of one function fails. COGFS_FAIL=function:n:errno, for example pwrite:5:5. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

static int fails(const char *function)
{
    static int calls;
    const char *wanted = getenv("COGFS_FAIL");
    size_t length = strlen(function);

    if (!wanted || strncmp(wanted, function, length) != 0 || wanted[length] != ':')
        return 0;
    char *end;
    long passing = strtol(wanted + length + 1, &end, 10);
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != passing)
        return 0;
    errno = atoi(end + 1);
    return 1;
}

#define NEXT(function) ((__typeof__(&function))dlsym(RTLD_NEXT, #function))

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    return fails("pwrite") ? -1 : NEXT(pwrite)(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    return fails("pwrite") ? -1 : NEXT(pwrite64)(fd, data, size, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    return fails("writev") ? -1 : NEXT(writev)(fd, parts, count);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    return fails("pwritev") ? -1 : NEXT(pwritev2)(fd, parts, count, offset, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    return fails("pwritev") ? -1 : NEXT(pwritev64v2)(fd, parts, count, offset, flags);
}

int fdatasync(int fd)
{
    return fails("fdatasync") ? -1 : NEXT(fdatasync)(fd);
}

int fsync(int fd)
{
    return fails("fsync") ? -1 : NEXT(fsync)(fd);
}
