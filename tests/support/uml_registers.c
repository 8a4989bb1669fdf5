/* Preloaded into user-mode Linux: it may run on processors whose state is larger than it knows of.
 *
 * Linux 6.1 as a process keeps 832 bytes of a program's floating-point registers, and the host's
 * kernel refuses to set less than all of them, which are more with AVX-512. What is missing is set
 * to what the program has at the moment. The programs inside are told not to use AVX-512.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/elf.h>
#include <linux/ptrace.h>
#include <stdarg.h>
#include <string.h>
#include <sys/uio.h>

typedef long (*ptrace_function)(long, ...);

long ptrace(long request, ...) {
    static char whole[1 << 16] __attribute__((aligned(64)));
    ptrace_function original = (ptrace_function)dlsym(RTLD_NEXT, "ptrace");
    struct iovec all = {whole, sizeof(whole)}, *some;
    va_list rest;
    long pid;
    void *address, *data;
    va_start(rest, request);
    pid = va_arg(rest, long);
    address = va_arg(rest, void *);
    data = va_arg(rest, void *);
    va_end(rest);
    if (request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE)
        return original(request, pid, address, data);
    some = data;
    if (original(PTRACE_GETREGSET, pid, address, &all) < 0 || all.iov_len <= some->iov_len)
        return original(request, pid, address, data);
    memcpy(whole, some->iov_base, some->iov_len);
    return original(request, pid, address, &all);
}
