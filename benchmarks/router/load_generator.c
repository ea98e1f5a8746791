// Closed-loop load over kept connections: each sends its next request when its last one has been answered.
//
//     load_generator PORT CONCURRENCY REQUESTS whole|stream BODY_BYTES GROUPS KEY MAX_SECONDS
//
// Bodies have BODY_BYTES in all; those of one group begin alike. Prints one line of JSON. A request counts as an error
// unless it is answered with 200 and a whole body.
#include "net.h"

enum { MAX_HEAD = 16384 };
enum state { IN_HEAD, IN_LENGTH, IN_CHUNK_SIZE, IN_CHUNK, IN_CHUNK_END, IN_TRAILER };

struct connection {
    int fd;
    enum state state;
    char head[MAX_HEAD];
    size_t head_length;
    int status;
    bool keeps_alive;
    int64_t left, started_us, first_byte_us;
};

static int port, concurrency, num_requests, num_groups, body_bytes;
static bool is_stream;
static const char *key;
static int num_issued, num_done, num_errors, num_good;
static int64_t num_chunks;
static double *latency_ms, *ttft_ms;
static char **prefixes;
static int poller;

static int connect_to_router(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = loopback(port);
    int attempts = 0;
    while (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        if (++attempts == 50) die("connect");
        usleep(2000);
    }
    no_delay(fd);
    return fd;
}

static void close_connection(struct connection *c) {
    close(c->fd);
    c->fd = -1;
}

static void send_next(struct connection *c) {
    if (num_issued == num_requests) return;
    if (c->fd < 0) {
        c->fd = connect_to_router();
        struct epoll_event event = {EPOLLIN, {.ptr = c}};
        epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    }
    static char message[1 << 20], body[1 << 20];
    int id = num_issued++;
    int length = snprintf(body, sizeof body,
                          "{\"model\":\"mock\",\"stream\":%s,\"max_tokens\":64,\"messages\":[{\"role\":\"system\",\"content\":"
                          "\"%s\"},{\"role\":\"user\",\"content\":\"question number %8d, please answer\"}]}",
                          is_stream ? "true" : "false", prefixes[(id * 7919L) % num_groups], id);
    int total = snprintf(message, sizeof message,
                         "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                         "authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s",
                         port, key, length, body);
    c->state = IN_HEAD;
    c->head_length = 0;
    c->first_byte_us = 0;
    c->started_us = now_us();
    write_all(c->fd, message, total);  // a router that is gone is noticed when the answer is read
}

static void finish(struct connection *c, bool is_whole) {
    num_done++;
    if (is_whole && c->status == 200) {
        int64_t now = now_us();
        latency_ms[num_good] = (now - c->started_us) / 1e3;
        ttft_ms[num_good++] = ((c->first_byte_us ? c->first_byte_us : now) - c->started_us) / 1e3;
    } else {
        num_errors++;
    }
    if (!is_whole || !c->keeps_alive) close_connection(c);
    send_next(c);
}

// Take what belongs to the head; return how many bytes did, -1 if it is none.
static ssize_t feed_head(struct connection *c, const char *data, size_t length) {
    size_t before = c->head_length, room = MAX_HEAD - 1 - before, taken = length < room ? length : room;
    memcpy(c->head + before, data, taken);
    c->head_length += taken;
    c->head[c->head_length] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) return taken == room ? -1 : (ssize_t)taken;
    *end = 0;
    c->status = atoi(c->head + 9);
    c->keeps_alive = !header(c->head, "connection: close");
    const char *content_length = header(c->head, "content-length:");
    if (header(c->head, "transfer-encoding: chunked")) c->state = IN_CHUNK_SIZE;
    else if (content_length) c->state = IN_LENGTH;
    else return -1;
    c->left = content_length && c->state == IN_LENGTH ? atol(content_length) : 0;
    return end + 4 - c->head - before;
}

static int hex(char digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    digit |= 32;
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

// Take bytes of the answer; return true when it is whole.
static bool feed_body(struct connection *c, const char *data, size_t length) {
    if (c->state == IN_LENGTH) {
        c->left -= length;
        return c->left <= 0;
    }
    while (length) {
        if (c->state == IN_CHUNK) {
            size_t taken = (int64_t)length < c->left ? length : (size_t)c->left;
            data += taken;
            length -= taken;
            c->left -= taken;
            if (!c->left) {
                c->state = IN_CHUNK_END;
                num_chunks++;
            }
            continue;
        }
        char byte = *data++;
        length--;
        if (c->state == IN_TRAILER) {
            if (byte == '\n') return true;
        } else if (c->state == IN_CHUNK_END) {
            if (byte == '\n') c->state = IN_CHUNK_SIZE;
        } else if (byte == '\n') {
            c->state = c->left ? IN_CHUNK : IN_TRAILER;
        } else if (hex(byte) >= 0) {
            c->left = c->left * 16 + hex(byte);
        }
    }
    return false;
}

static void readable(struct connection *c) {
    static char data[1 << 16];
    ssize_t got = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        finish(c, false);
        return;
    }
    ssize_t taken = c->state == IN_HEAD ? feed_head(c, data, got) : 0;
    if (taken < 0) {
        finish(c, false);
        return;
    }
    if (c->state == IN_HEAD) return;
    if (taken < got && !c->first_byte_us) c->first_byte_us = now_us();
    if (feed_body(c, data + taken, got - taken)) finish(c, true);
}

static void make_prefixes(void) {
    int length = body_bytes - 200 > 0 ? body_bytes - 200 : 0;  // the rest of a body takes about 200
    prefixes = malloc(num_groups * sizeof *prefixes);
    for (int g = 0; g < num_groups; g++) {
        uint32_t seed = g * 2654435761u + 12345;
        prefixes[g] = malloc(length + 1);
        for (int i = 0; i < length; i++) {
            seed = seed * 1103515245 + 12345;
            prefixes[g][i] = i % 6 == 5 ? ' ' : 'a' + (seed >> 16) % 26;
        }
        prefixes[g][length] = 0;
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(double *values, double share) {
    return num_good ? values[(int)((num_good - 1) * share)] : 0;
}

int main(int argc, char **argv) {
    if (argc != 9) {
        fprintf(stderr, "usage: load_generator PORT CONCURRENCY REQUESTS whole|stream BODY_BYTES GROUPS KEY MAX_SECONDS\n");
        return 2;
    }
    port = atoi(argv[1]);
    concurrency = atoi(argv[2]);
    num_requests = atoi(argv[3]);
    is_stream = !strcmp(argv[4], "stream");
    body_bytes = atoi(argv[5]);
    num_groups = atoi(argv[6]);
    key = argv[7];
    int64_t max_us = atol(argv[8]) * 1000000LL;
    make_prefixes();
    latency_ms = malloc(num_requests * sizeof *latency_ms);
    ttft_ms = malloc(num_requests * sizeof *ttft_ms);
    poller = epoll_create1(0);
    struct connection *all = calloc(concurrency, sizeof *all);
    int64_t started_us = now_us();
    for (int i = 0; i < concurrency; i++) {
        all[i].fd = -1;
        send_next(&all[i]);
    }
    struct epoll_event events[256];
    while (num_done < num_requests && now_us() - started_us < max_us) {
        int count = epoll_wait(poller, events, 256, 100);
        for (int i = 0; i < count; i++) readable(events[i].data.ptr);
    }
    double seconds = (now_us() - started_us) / 1e6;
    qsort(latency_ms, num_good, sizeof *latency_ms, ascending);
    qsort(ttft_ms, num_good, sizeof *ttft_ms, ascending);
    printf("{\"good\":%d,\"errors\":%d,\"unfinished\":%d,\"seconds\":%.4f,\"p50_ms\":%.4f,\"p99_ms\":%.4f,"
           "\"ttft_p50_ms\":%.4f,\"ttft_p99_ms\":%.4f,\"chunks\":%lld}\n",
           num_good, num_errors, num_requests - num_done, seconds, percentile(latency_ms, 0.5),
           percentile(latency_ms, 0.99), percentile(ttft_ms, 0.5), percentile(ttft_ms, 0.99), (long long)num_chunks);
    return 0;
}
