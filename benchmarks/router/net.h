// What mock backend and load generator share: a clock, sockets, and the length of a message.
#pragma once
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static inline int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline struct sockaddr_in loopback(int port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static inline void no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// Write everything. Messages are small and readers fast: a full socket buffer is rare enough to wait for.
static inline bool write_all(int fd, const char *data, size_t length) {
    while (length) {
        ssize_t sent = send(fd, data, length, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) return false;
            struct pollfd wait = {.fd = fd, .events = POLLOUT};
            if (poll(&wait, 1, 1000) <= 0) return false;
            continue;
        }
        data += sent;
        length -= sent;
    }
    return true;
}

// Return a header's value inside a head that ends with a zero byte, or NULL.
static inline const char *header(const char *head, const char *name_and_colon) {
    const char *found = strcasestr(head, name_and_colon);
    return found ? found + strlen(name_and_colon) : NULL;
}
