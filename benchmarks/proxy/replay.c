// The upstream of the proxies' benchmark: answers chat completions with recorded bytes of vLLM, at next to no cost.
//
//     cc -O2 -o replay benchmarks/proxy/replay.c
//     replay FOLDER PORT [CHUNKS_PER_SECOND [PROCESSES [SOCKET]]]
//
// FOLDER holds {whole,stream}_{plain,captured}_{64,512}, in which "chatcmpl-recorded" stands for the reply's id. A request
// that asks for log-probabilities or token ids gets the captured one; max_tokens above 64 gets 512 tokens. Streams are
// sent as uvicorn sends them, each event a chunk and a write of its own, so many a second to each stream (0: at once).
// So many processes share the port. GET /health and /v1/models are answered too, and a completion with what says that log-probabilities are processed.
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MARK "chatcmpl-recorded"
#define MARK_LENGTH (sizeof MARK - 1)
#define MOST_ID 128

typedef struct {
    const char *text;
    size_t length;
    ssize_t mark;  // where the id stands, or -1
    int is_usage;  // the event that a client gets only if it asks for it
} Piece;

typedef struct {
    Piece *pieces;
    int count;
} Tape;

typedef struct Connection {
    int fd;
    int closing;
    char *in, *out;
    size_t in_length, in_room, out_start, out_length, out_room;
    const Tape *tape;  // the stream under way, or NULL
    int next, usage;
    char id[MOST_ID + 16];
    int64_t due;
    struct Connection *before, *after;  // in the order in which the streams' next chunks are due
    int queued;
} Connection;

static Tape tapes[2][2][2];  // [stream][captured][512 tokens]
static Connection queue = {.before = &queue, .after = &queue};
static int64_t interval;
static int poller;
static unsigned long long answered;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static char *read_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    struct stat status;
    if (!file || fstat(fileno(file), &status)) die(path);
    char *text = malloc(status.st_size + 1);
    if (fread(text, 1, status.st_size, file) != (size_t)status.st_size) die(path);
    text[status.st_size] = 0;
    *length = status.st_size;
    fclose(file);
    return text;
}

static void add_piece(Tape *tape, const char *text, size_t length) {
    tape->pieces = realloc(tape->pieces, (tape->count + 1) * sizeof(Piece));
    const char *mark = memmem(text, length, MARK, MARK_LENGTH);
    tape->pieces[tape->count++] = (Piece){
        text, length, mark ? mark - text : -1, memmem(text, length, "\"choices\":[],", 13) != NULL};
}

static void load_tape(const char *folder, int stream, int captured, int many) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s_%s_%s", folder, stream ? "stream" : "whole", captured ? "captured" : "plain",
             many ? "512" : "64");
    size_t length;
    char *text = read_file(path, &length), *end = text + length;
    Tape *tape = &tapes[stream][captured][many];
    if (!stream) {
        add_piece(tape, text, length);
        return;
    }
    for (char *event = text, *blank; (blank = memmem(event, end - event, "\n\n", 2)); event = blank + 2)
        add_piece(tape, event, blank + 2 - event);
}

static void grow(char **buffer, size_t *room, size_t needed) {
    if (needed <= *room) return;
    while (*room < needed) *room = *room ? 2 * *room : 16384;
    *buffer = realloc(*buffer, *room);
}

static void put(Connection *c, const char *text, size_t length) {
    grow(&c->out, &c->out_room, c->out_length + length);
    memcpy(c->out + c->out_length, text, length);
    c->out_length += length;
}

static void unqueue(Connection *c) {
    if (!c->queued) return;
    c->before->after = c->after;
    c->after->before = c->before;
    c->queued = 0;
}

static void enqueue(Connection *c) {
    c->before = queue.before;
    c->after = &queue;
    queue.before->after = c;
    queue.before = c;
    c->queued = 1;
}

static void drop(Connection *c) {
    unqueue(c);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

// Returns 0 if the connection is gone.
static int flush(Connection *c) {
    while (c->out_start < c->out_length) {
        ssize_t sent = send(c->fd, c->out + c->out_start, c->out_length - c->out_start, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) return 1;
            drop(c);
            return 0;
        }
        c->out_start += sent;
    }
    c->out_start = c->out_length = 0;
    if (c->closing && !c->tape) {
        drop(c);
        return 0;
    }
    return 1;
}

static size_t spoken(const Connection *c, const Piece *piece) {
    return piece->length + (piece->mark < 0 ? 0 : strlen(c->id) - MARK_LENGTH);
}

static void speak(Connection *c, const Piece *piece) {
    if (piece->mark < 0) {
        put(c, piece->text, piece->length);
        return;
    }
    put(c, piece->text, piece->mark);
    put(c, c->id, strlen(c->id));
    put(c, piece->text + piece->mark + MARK_LENGTH, piece->length - piece->mark - MARK_LENGTH);
}

// Puts the next chunk of the stream. What follows the last token (usage, [DONE], the end) goes with it, as it does in vLLM.
static void put_chunk(Connection *c) {
    const Tape *tape = c->tape;
    do {
        const Piece *piece = &tape->pieces[c->next++];
        if (piece->is_usage && !c->usage) continue;
        char size[24];
        put(c, size, snprintf(size, sizeof size, "%zx\r\n", spoken(c, piece)));
        speak(c, piece);
        put(c, "\r\n", 2);
    } while (c->next < tape->count && c->next >= tape->count - 2);
    if (c->next == tape->count) {
        put(c, "0\r\n\r\n", 5);
        c->tape = NULL;
        answered++;
    }
}

static void answer(Connection *c, const char *status, const char *body) {
    char head[256];
    put(c, head, snprintf(head, sizeof head,
                          "HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: application/json\r\n\r\n",
                          status, strlen(body)));
    put(c, body, strlen(body));
}

// Where the value of a member of the body begins, whatever space stands around the colon; NULL if it has none.
static const char *member(const char *body, size_t length, const char *name) {
    const char *found = memmem(body, length, name, strlen(name));
    if (!found) return NULL;
    for (found += strlen(name); *found == ' ' || *found == ':'; found++);
    return found;
}

static int is_true(const char *body, size_t length, const char *name) {
    const char *value = member(body, length, name);
    return value && !strncmp(value, "true", 4);
}

static void take_id(Connection *c, const char *head) {
    const char *given = strcasestr(head, "\r\nx-request-id:");
    if (!given) {
        snprintf(c->id, sizeof c->id, "chatcmpl-%016llx%016llx", (unsigned long long)now_ns(), answered);
        return;
    }
    for (given += 15; *given == ' '; given++);
    int length = strcspn(given, "\r");
    snprintf(c->id, sizeof c->id, "chatcmpl-%.*s", length < MOST_ID ? length : MOST_ID, given);
}

// Returns 0 if the connection is gone.
static int chat(Connection *c, const char *head, const char *body, size_t length) {
    int stream = is_true(body, length, "\"stream\"");
    int captured = is_true(body, length, "\"logprobs\"") || is_true(body, length, "\"return_token_ids\"");
    const char *most = member(body, length, "\"max_tokens\"");
    if (!most) most = member(body, length, "\"max_completion_tokens\"");
    const Tape *tape = &tapes[stream][captured][most && atoi(most) > 64];
    take_id(c, head);
    if (!stream) {
        char line[256];
        put(c, line, snprintf(line, sizeof line,
                              "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
                              "content-length: %zu\r\ncontent-type: application/json\r\n\r\n",
                              spoken(c, tape->pieces)));
        speak(c, tape->pieces);
        answered++;
        return flush(c);
    }
    const char *line =
        "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
        "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    put(c, line, strlen(line));
    c->tape = tape;
    c->next = 0;
    c->usage = is_true(body, length, "\"include_usage\"");
    if (interval) {
        c->due = now_ns() + interval;
        enqueue(c);
        return flush(c);
    }
    while (c->tape) {
        put_chunk(c);
        if (!flush(c)) return 0;
    }
    return 1;
}

// Returns 0 if the connection is gone.
static int route(Connection *c, const char *head, const char *body, size_t length) {
    if (!strncmp(head, "POST /v1/chat/completions ", 26)) return chat(c, head, body, length);
    if (!strncmp(head, "GET /health ", 12)) answer(c, "200 OK", "");
    else if (!strncmp(head, "GET /v1/models ", 15))
        answer(c, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\",\"created\":1,"
                            "\"owned_by\":\"vllm\",\"root\":\"tiny\",\"parent\":null,\"max_model_len\":4096}]}");
    else if (!strncmp(head, "POST /v1/completions ", 21))
        answer(c, "200 OK", "{\"choices\":[{\"logprobs\":{\"token_logprobs\":[0.0]}}]}");
    else answer(c, "404 Not Found", "{\"detail\":\"Not Found\"}");
    return flush(c);
}

// Answers the requests that have come whole; returns 0 if the connection is gone.
static int take_requests(Connection *c) {
    while (!c->tape && c->in_length) {
        c->in[c->in_length] = 0;
        char *blank = memmem(c->in, c->in_length, "\r\n\r\n", 4);
        if (!blank) return 1;
        size_t head = blank + 4 - c->in;
        blank[2] = 0;
        const char *sized = strcasestr(c->in, "\r\ncontent-length:");
        size_t body = sized ? strtoul(sized + 17, NULL, 10) : 0;
        c->closing |= strcasestr(c->in, "\r\nconnection: close") != NULL;
        int unsized = strcasestr(c->in, "\r\ntransfer-encoding:") != NULL;
        blank[2] = '\r';
        if (unsized) {
            answer(c, "411 Length Required", "{}");
            c->closing = 1;
            return flush(c);
        }
        if (c->in_length < head + body) return 1;
        char kept = c->in[head + body];
        blank[2] = c->in[head + body] = 0;
        if (!route(c, c->in, c->in + head, body)) return 0;
        c->in[head + body] = kept;
        c->in_length -= head + body;
        memmove(c->in, c->in + head + body, c->in_length);
    }
    return 1;
}

static void hear(Connection *c) {
    for (;;) {
        grow(&c->in, &c->in_room, c->in_length + 8193);
        ssize_t got = recv(c->fd, c->in + c->in_length, c->in_room - c->in_length - 1, 0);
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) {
            drop(c);
            return;
        }
        c->in_length += got;
    }
    take_requests(c);
}

static void accept_all(int listening) {
    int fd, on = 1;
    while ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        Connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event)) die("epoll_ctl");
    }
}

// Sends the chunks that are due; returns the nanoseconds until the next one, or -1.
static int64_t send_due(void) {
    while (queue.after != &queue) {
        Connection *c = queue.after;
        int64_t now = now_ns();
        if (c->due > now) return c->due - now;
        unqueue(c);
        put_chunk(c);
        if (c->tape) {
            c->due += interval;
            if (c->due < now) c->due = now;  // never catches up in a burst
            enqueue(c);
            flush(c);
        } else if (flush(c)) take_requests(c);
    }
    return -1;
}

static int listen_on(struct sockaddr *address, socklen_t size) {
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->sa_family == AF_INET) setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    if (bind(fd, address, size) || listen(fd, 1024)) die("listen");
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    event.data.u64 = (uint64_t)fd << 1 | 1;  // pointers are even
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event)) die("epoll_ctl");
    return fd;
}

int main(int count, char **words) {
    if (count < 3) {
        fprintf(stderr, "usage: %s FOLDER PORT [CHUNKS_PER_SECOND [PROCESSES [SOCKET]]]\n", words[0]);
        return 2;
    }
    for (int which = 0; which < 8; which++) load_tape(words[1], which >> 2, which >> 1 & 1, which & 1);
    double per_s = count > 3 ? atof(words[3]) : 0;
    interval = per_s > 0 ? 1e9 / per_s : 0;
    int alone = 1;
    for (int others = count > 4 ? atoi(words[4]) - 1 : 0; others > 0 && alone; others--)
        if (!fork()) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alone = 0;
        }
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct sockaddr_in port = {.sin_family = AF_INET, .sin_port = htons(atoi(words[2]))};
    port.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listen_on((struct sockaddr *)&port, sizeof port);
    if (alone && count > 5) {
        struct sockaddr_un local = {.sun_family = AF_UNIX};
        strncpy(local.sun_path, words[5], sizeof local.sun_path - 1);
        unlink(words[5]);
        listen_on((struct sockaddr *)&local, sizeof local);
    }
    struct epoll_event events[256];
    for (;;) {
        int64_t wait = send_due();
        struct timespec until = {wait / 1000000000, wait % 1000000000};
        int ready = epoll_pwait2(poller, events, 256, wait < 0 ? NULL : &until, NULL);
        for (int i = 0; i < ready; i++) {
            if (events[i].data.u64 & 1) {
                accept_all(events[i].data.u64 >> 1);
                continue;
            }
            Connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT && !flush(c)) continue;
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) hear(c);
        }
    }
}
