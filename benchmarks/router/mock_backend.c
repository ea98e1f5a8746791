// Several OpenAI-compatible backends in one process, cheap enough not to be what a router waits for.
//
//     mock_backend NUM_CHUNKS GAP_US PORT...
//
// A reply has a fixed text; a stream has NUM_CHUNKS events, GAP_US apart, each written on its own. What routers ask for
// when they start (models, health, metrics, server info) is answered as vLLM and SGLang do.
#include "net.h"

enum { MAX_FDS = 16384, FIRST_BUFFER = 16384 };

struct connection {
    int fd;
    char *in;
    size_t length, capacity;
    int chunks_left;  // of the stream under way, 0 if there is none
    int64_t due_us;
    struct connection *next;
    bool is_closed;
};

static struct connection *connections[MAX_FDS];
static bool is_listener[MAX_FDS];
static int num_chunks;
static int64_t gap_us;
static char event_chunk[512], last_chunks[512];

// Gaps are all equal, so whoever joins last is due last: a queue is in order by itself.
static struct connection *first_due, *last_due;

static void join_queue(struct connection *c) {
    c->next = NULL;
    if (last_due) last_due->next = c;
    else first_due = c;
    last_due = c;
}

static void release(struct connection *c) {
    free(c->in);
    free(c);
}

static void close_connection(struct connection *c) {
    connections[c->fd] = NULL;
    close(c->fd);
    if (c->chunks_left) c->is_closed = true;  // it is in the queue, which releases it
    else release(c);
}

static bool reply(int fd, const char *kind, const char *body) {
    char message[2048];
    int length = snprintf(message, sizeof message, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s",
                          kind, strlen(body), body);
    return write_all(fd, message, length);
}

static bool tell(int fd, const char *path) {
    if (strstr(path, "models"))
        return reply(fd, "application/json",
                     "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,"
                     "\"owned_by\":\"vllm\",\"root\":\"mock\",\"max_model_len\":131072}]}");
    if (strstr(path, "metrics"))
        return reply(fd, "text/plain", "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n");
    if (strstr(path, "load"))
        return reply(fd, "application/json", "{\"load\":0,\"timestamp\":0,\"dp_rank_count\":1,\"loads\":[],\"aggregate\":{}}");
    if (strstr(path, "version")) return reply(fd, "application/json", "{\"version\":\"0.32.0\"}");
    return reply(fd, "application/json",
                 "{\"status\":\"ok\",\"model_id\":\"mock\",\"model_path\":\"mock\",\"served_model_name\":\"mock\","
                 "\"version\":\"0.5.0\",\"max_total_num_tokens\":1000000}");
}

static bool start_stream(struct connection *c) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    if (!write_all(c->fd, head, sizeof head - 1)) return false;
    c->chunks_left = num_chunks;
    c->due_us = now_us();
    join_queue(c);
    return true;
}

static bool work(struct connection *c, const char *body) {
    if (strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true")) return start_stream(c);
    return reply(c->fd, "application/json",
                 "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"mock\","
                 "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"An answer that goes on for "
                 "some tokens, so as to be about as long as a short reply of a model would be to a short question.\"},"
                 "\"logprobs\":null,\"finish_reason\":\"stop\"}],"
                 "\"usage\":{\"prompt_tokens\":500,\"completion_tokens\":64,\"total_tokens\":564}}");
}

// Return the length of the body behind a head, -1 if it has not come in full.
static ssize_t body_length(const struct connection *c, const char *head, size_t head_length) {
    const char *length = header(head, "content-length:");
    if (length) {
        ssize_t wanted = atol(length);
        return c->length - head_length >= (size_t)wanted ? wanted : -1;
    }
    if (!header(head, "transfer-encoding: chunked")) return 0;
    const char *body = c->in + head_length;
    const char *end = memmem(body, c->length - head_length, "0\r\n\r\n", 5);
    return end ? end + 5 - body : -1;
}

// Answer the requests in the buffer, but for what comes behind a stream that has begun.
static bool answer(struct connection *c) {
    while (!c->chunks_left) {
        char *end = memmem(c->in, c->length, "\r\n\r\n", 4);
        if (!end) return true;
        size_t head_length = end + 4 - c->in;
        *end = 0;
        ssize_t length = body_length(c, c->in, head_length);
        bool is_asked_to_go_on = length < 0 && c->length == head_length && header(c->in, "expect: 100");
        *end = '\r';
        if (is_asked_to_go_on && !write_all(c->fd, "HTTP/1.1 100 Continue\r\n\r\n", 25)) return false;
        if (length < 0) return true;
        size_t total = head_length + length;
        char saved = c->in[total];
        c->in[total] = 0;
        bool is_fine = c->in[0] == 'G' ? tell(c->fd, c->in) : work(c, c->in + head_length);
        c->in[total] = saved;
        if (!is_fine) return false;
        c->length -= total;
        memmove(c->in, c->in + total, c->length);
    }
    return true;
}

static void readable(struct connection *c) {
    for (;;) {
        if (c->length + 1 >= c->capacity) {
            c->capacity *= 2;
            c->in = realloc(c->in, c->capacity);
        }
        ssize_t got = recv(c->fd, c->in + c->length, c->capacity - c->length - 1, 0);
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) {
            close_connection(c);
            return;
        }
        c->length += got;
    }
    if (!answer(c)) close_connection(c);
}

static void accept_all(int listener, int poller) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FDS) {
            close(fd);
            continue;
        }
        no_delay(fd);
        struct connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->capacity = FIRST_BUFFER;
        c->in = malloc(c->capacity);
        connections[fd] = c;
        struct epoll_event event = {EPOLLIN | EPOLLRDHUP, {.fd = fd}};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void send_due_chunks(void) {
    int64_t now = now_us();
    while (first_due && (first_due->is_closed || first_due->due_us <= now)) {
        struct connection *c = first_due;
        first_due = c->next;
        if (!first_due) last_due = NULL;
        if (c->is_closed) {
            release(c);
            continue;
        }
        c->chunks_left--;
        const char *chunk = c->chunks_left ? event_chunk : last_chunks;
        bool is_fine = write_all(c->fd, chunk, strlen(chunk));
        if (is_fine && c->chunks_left) {
            c->due_us = (gap_us ? c->due_us : now) + gap_us;
            join_queue(c);
        } else {
            c->chunks_left = 0;
            if (!is_fine || !answer(c)) close_connection(c);
        }
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = loopback(port);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 1024)) die("bind");
    is_listener[fd] = true;
    return fd;
}

static void make_chunks(void) {
    const char *event =
        "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\","
        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
    snprintf(event_chunk, sizeof event_chunk, "%zx\r\n%s\r\n", strlen(event), event);
    const char *last =
        "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\","
        "\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    snprintf(last_chunks, sizeof last_chunks, "%zx\r\n%s\r\n0\r\n\r\n", strlen(last), last);
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: mock_backend NUM_CHUNKS GAP_US PORT...\n");
        return 2;
    }
    num_chunks = atoi(argv[1]);
    gap_us = atol(argv[2]);
    make_chunks();
    int poller = epoll_create1(0);
    for (int i = 3; i < argc; i++) {
        int fd = listen_on(atoi(argv[i]));
        struct epoll_event event = {EPOLLIN, {.fd = fd}};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
    puts("listening");
    fflush(stdout);
    struct epoll_event events[256];
    for (;;) {
        int timeout_ms = -1;
        if (first_due) {
            int64_t left = first_due->due_us - now_us();
            timeout_ms = left <= 0 ? 0 : (int)((left + 999) / 1000);
        }
        int count = epoll_wait(poller, events, 256, timeout_ms);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (is_listener[fd]) accept_all(fd, poller);
            else if (connections[fd]) readable(connections[fd]);
        }
        send_due_chunks();
    }
}
