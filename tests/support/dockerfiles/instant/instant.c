/* A server that answers at once, the way JupyterHub expects of a single-user server.
 *
 * Started in a millisecond, so that what tests and benchmarks time is the spawner. Every
 * path answers 200 with the hub's version header; a path that ends in /env shows the
 * environment, and one that ends in /devices the NVIDIA device nodes, one a line.
 */
#include <arpa/inet.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

extern char **environ;
static char body[1 << 18];

static void end(int number) { (void)number; _exit(0); }

static void add(const char *line) {
    size_t used = strlen(body);
    snprintf(body + used, sizeof body - used, "%s\n", line);
}

static int ends_with(const char *path, const char *end_of_it) {
    size_t a = strlen(path), b = strlen(end_of_it);
    return a >= b && strcmp(path + a - b, end_of_it) == 0;
}

static void fill_body(const char *path) {
    body[0] = 0;
    if (ends_with(path, "/env")) {
        for (char **e = environ; *e; e++) add(*e);
    } else if (ends_with(path, "/devices")) {
        glob_t found;
        if (glob("/dev/nvidia*", 0, NULL, &found) == 0)
            for (size_t i = 0; i < found.gl_pathc; i++) add(found.gl_pathv[i]);
        globfree(&found);
    } else {
        add("{}");
    }
}

static void answer(int connection, const char *version) {
    static char request[16384], head[512];
    size_t have = 0;
    ssize_t n;
    while ((n = read(connection, request + have, sizeof request - 1 - have)) > 0) {
        have += (size_t)n;
        request[have] = 0;
        if (strstr(request, "\r\n\r\n") || have >= sizeof request - 1) break;
    }
    if (have == 0) return;
    char path[4096] = "/";
    sscanf(request, "%*s %4095[^ ?]", path);
    fill_body(path);
    int size = snprintf(head, sizeof head,
        "HTTP/1.1 200 OK\r\nX-JupyterHub-Version: %s\r\nContent-Type: text/plain\r\n"
        "Content-Length: %zu\r\nConnection: close\r\n\r\n", version, strlen(body));
    if (write(connection, head, (size_t)size) == size)
        if (write(connection, body, strlen(body)) < 0) return;
    shutdown(connection, SHUT_WR);
}

int main(void) {
    signal(SIGTERM, end);
    signal(SIGINT, end);
    signal(SIGPIPE, SIG_IGN);
    const char *version = getenv("INSTANT_JUPYTERHUB_VERSION");
    const char *url = getenv("JUPYTERHUB_SERVICE_URL");
    const char *host = url ? strstr(url, "://") : NULL;
    const char *colon = host ? strchr(host + 3, ':') : NULL;
    int port = colon ? atoi(colon + 1) : 8888, yes = 1;
    int listening = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    here.sin_addr.s_addr = htonl(INADDR_ANY);
    if (bind(listening, (struct sockaddr *)&here, sizeof here) || listen(listening, 128)) {
        perror("instant: cannot listen");
        return 1;
    }
    printf("instant: listening on port %d\n", port);
    fflush(stdout);
    for (;;) {
        int connection = accept(listening, NULL, NULL);
        if (connection < 0) continue;
        struct timeval patience = {.tv_sec = 2};
        setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        answer(connection, version ? version : "");
        close(connection);
    }
}
