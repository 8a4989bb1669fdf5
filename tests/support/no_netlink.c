/* Preloaded into the tests' browser: it may not ask the kernel about network interfaces.
 *
 * Chromium breaks off requests, even to 127.0.0.1, whenever an address comes or goes on any
 * interface (ERR_NETWORK_CHANGED), and the tests beside it start containers, whose interfaces come
 * and go all the time. Without netlink it takes the machine as online and hears of no change.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int socket(int domain, int type, int protocol) {
    if (domain == AF_NETLINK) {
        errno = EAFNOSUPPORT;
        return -1;
    }
    return (int)syscall(SYS_socket, domain, type, protocol);
}
