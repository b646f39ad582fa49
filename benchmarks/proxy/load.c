// The load of the proxies' benchmark: one request, over and over, on many keep-alive connections of one thread.
//
//     cc -O2 -o load benchmarks/proxy/load.c
//     load -p PORT -b BODY [-u PATH] [-h HEADER] [-c CONNECTIONS] [-s SECONDS | -n REQUESTS] [-r PER_SECOND | -w WAIT_US]
//          [-g STAGGER_US] [-e REPORT_SECONDS] [-m REPORT_REQUESTS]
//
// Without -r or -w each connection asks again at once. With -r requests are due so many a second in all, and one that is
// sent late has waited since it was due. With -w a connection rests that long after each reply. -g spreads the first
// requests over that time. At the end, and after every so many seconds or requests, it prints a line of JSON; times are of
// the whole round trip, to the last byte. `events` are the server-sent events, `ended` the streams that said [DONE].
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NEVER INT64_MAX
#define MOST_HEAD 16384

typedef enum { HEAD, SIZED, UNTIL_CLOSED, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER } Part;

typedef struct {
    int fd, busy, status, closing, head_length, line_length, data_seen, done_seen, ended;
    size_t sent;
    Part part;
    unsigned long long left;
    int64_t begun, due;  // due: when it asks next
    char head[MOST_HEAD + 1], line[32];
} Connection;

static int port, connections = 32, poller, stopped;
static const char *path = "/v1/chat/completions", *header = "", *body_file;
static double seconds = 1e9, per_s, report_s;
static unsigned long long most = UINT64_MAX, report_requests, asked, done_all, next_due;
static int64_t wait_ns, stagger_ns, started;
static char *request;
static size_t request_length;
static Connection *all;

// What is reported: all of it, and since the last report.
typedef struct {
    unsigned long long failed, events, ended, bytes;
    size_t count, room;
    uint32_t *us;
    int64_t since;
} Report;
static Report total, recent;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void make_request(void) {
    FILE *file = fopen(body_file, "rb");
    struct stat status;
    if (!file || fstat(fileno(file), &status)) die(body_file);
    request = malloc(status.st_size + 512);
    int head = sprintf(request,
                       "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nAccept: */*\r\n"
                       "%s%sContent-Length: %lld\r\n\r\n",
                       path, port, header, *header ? "\r\n" : "", (long long)status.st_size);
    if (fread(request + head, 1, status.st_size, file) != (size_t)status.st_size) die(body_file);
    request_length = head + status.st_size;
    fclose(file);
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t percentile(const Report *report, double percent) {
    if (!report->count) return 0;
    size_t rank = percent / 100 * report->count;
    return report->us[rank < report->count ? rank : report->count - 1];
}

static void print(Report *report, int64_t now) {
    qsort(report->us, report->count, sizeof *report->us, by_size);
    printf("{\"requests\":%zu,\"failed\":%llu,\"all\":%llu,\"seconds\":%.6f,\"events\":%llu,\"ended\":%llu,\"bytes\":%llu,"
           "\"p50_us\":%u,\"p99_us\":%u,\"max_us\":%u,\"final\":%s}\n",
           report->count, report->failed, done_all, (now - report->since) / 1e9, report->events, report->ended,
           report->bytes, percentile(report, 50), percentile(report, 99), percentile(report, 100),
           report == &total ? "true" : "false");
    fflush(stdout);
    report->failed = report->events = report->ended = report->bytes = report->count = 0;
    report->since = now;
}

static void add(Report *report, const Connection *c, int64_t now) {
    if (report->count == report->room) {
        report->room = report->room ? 2 * report->room : 65536;
        report->us = realloc(report->us, report->room * sizeof *report->us);
    }
    report->us[report->count++] = (now - c->begun) / 1000;
    report->ended += c->ended;
}

static void disconnect(Connection *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void rest(Connection *c, int64_t now) {
    c->busy = 0;
    c->due = per_s > 0 ? 0 : now + wait_ns;
}

static void fail(Connection *c, int64_t now) {
    static int told;
    if (told++ < 3) fprintf(stderr, "failed: status %d, part %d, errno %d: %.200s\n", c->status, c->part, errno, c->head);
    total.failed++;
    recent.failed++;
    done_all++;
    disconnect(c);
    rest(c, now + 10000000);
}

static void finish(Connection *c) {
    int64_t now = now_ns();
    if (c->status != 200) {
        fail(c, now);
        return;
    }
    add(&total, c, now);
    add(&recent, c, now);
    done_all++;
    if (c->closing) disconnect(c);
    rest(c, now);
    if (report_requests && done_all % report_requests == 0) print(&recent, now);
}

static int connect_one(Connection *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) return 0;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    return !epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
}

static void ask(Connection *c, int64_t since) {
    c->busy = 1;
    c->begun = since;
    c->part = HEAD;
    c->status = c->closing = c->head_length = c->line_length = c->data_seen = c->done_seen = c->ended = 0;
    c->head[0] = 0;
    asked++;
    if (c->fd < 0 && !connect_one(c)) {
        fail(c, now_ns());
        return;
    }
    // Blocking: the request fits into the socket's buffer.
    if (send(c->fd, request, request_length, MSG_NOSIGNAL) != (ssize_t)request_length) fail(c, now_ns());
}

// Counts what a stream says, across the borders of chunks.
static void hear_body(Connection *c, const char *text, size_t length) {
    static const char data[] = "data:", ended[] = "[DONE]";
    total.bytes += length;
    recent.bytes += length;
    for (size_t i = 0; i < length; i++) {
        c->data_seen = text[i] == data[c->data_seen] ? c->data_seen + 1 : text[i] == data[0];
        if (c->data_seen == 5) {
            c->data_seen = 0;
            total.events++;
            recent.events++;
        }
        c->done_seen = text[i] == ended[c->done_seen] ? c->done_seen + 1 : text[i] == ended[0];
        if (c->done_seen == 6) {
            c->done_seen = 0;
            c->ended = 1;
        }
    }
}

static void read_head(Connection *c) {
    c->status = atoi(c->head + 9);
    c->closing = strcasestr(c->head, "\r\nconnection: close") != NULL;
    const char *sized = strcasestr(c->head, "\r\ncontent-length:");
    if (strcasestr(c->head, "\r\ntransfer-encoding: chunked")) c->part = CHUNK_SIZE;
    else if (sized) {
        c->left = strtoull(sized + 17, NULL, 10);
        c->part = SIZED;
    } else {
        c->part = UNTIL_CLOSED;
        c->closing = 1;
    }
}

// Takes a line of the chunked encoding; returns whether it is whole, without its end.
static int take_line(Connection *c, char letter) {
    if (letter == '\n') {
        c->line[c->line_length] = 0;
        c->line_length = 0;
        return 1;
    }
    if (letter != '\r' && c->line_length < (int)sizeof c->line - 1) c->line[c->line_length++] = letter;
    return 0;
}

// Takes what came; returns how many bytes of it, and sets *whole when the reply has ended.
static size_t take(Connection *c, const char *text, size_t length, int *whole) {
    size_t part = length < c->left ? length : c->left;
    switch (c->part) {
        case HEAD:
            if (c->head_length == MOST_HEAD) die("the head of a reply is too long");
            c->head[c->head_length++] = *text;
            c->head[c->head_length] = 0;
            if (c->head_length > 3 && !memcmp(c->head + c->head_length - 4, "\r\n\r\n", 4)) {
                read_head(c);
                *whole = c->part == SIZED && !c->left;
            }
            return 1;
        case SIZED:
            hear_body(c, text, part);
            c->left -= part;
            *whole = !c->left;
            return part;
        case CHUNK:
            hear_body(c, text, part);
            c->left -= part;
            if (!c->left) c->part = CHUNK_END;
            return part;
        case UNTIL_CLOSED:
            hear_body(c, text, length);
            return length;
        case CHUNK_END:
            if (take_line(c, *text)) c->part = CHUNK_SIZE;
            return 1;
        case CHUNK_SIZE:
            if (take_line(c, *text)) {
                c->left = strtoull(c->line, NULL, 16);
                c->part = c->left ? CHUNK : TRAILER;
            }
            return 1;
        case TRAILER:
            if (take_line(c, *text)) *whole = !c->line[0];
            return 1;
    }
    return length;
}

static void hear(Connection *c) {
    static char text[1 << 18];
    ssize_t got = recv(c->fd, text, sizeof text, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (!c->busy) {  // an idle connection that the other side closes
        disconnect(c);
        return;
    }
    if (got <= 0) {
        if (!got && c->part == UNTIL_CLOSED) finish(c);
        else fail(c, now_ns());
        return;
    }
    int whole = 0;
    for (ssize_t taken = 0; taken < got && !whole;) taken += take(c, text + taken, got - taken, &whole);
    if (whole) finish(c);
}

// Lets those ask whose time has come; returns the nanoseconds until the next one, -1 if only replies are waited for.
static int64_t ask_due(void) {
    int64_t soonest = NEVER, now = now_ns();
    if (!stopped) stopped = asked >= most || now - started >= seconds * 1e9;
    for (int i = 0; i < connections && !stopped; i++) {
        Connection *c = &all[i];
        if (c->busy) continue;
        int64_t due = per_s > 0 ? started + (int64_t)(next_due * (1e9 / per_s)) : c->due;
        if (due > now) {
            if (due < soonest) soonest = due;
            continue;
        }
        if (per_s > 0) next_due++;
        ask(c, per_s > 0 ? due : now_ns());
        if (!c->busy && c->due < soonest) soonest = c->due;
        stopped = asked >= most;
    }
    if (stopped) return -1;
    int64_t end = started + (int64_t)(seconds < 1e8 ? seconds * 1e9 : 1e17);
    if (soonest > end) soonest = end;
    return soonest > now ? soonest - now : 0;
}

static int busy(void) {
    int count = 0;
    for (int i = 0; i < connections; i++) count += all[i].busy;
    return count;
}

static void read_options(int count, char **words) {
    for (int option; (option = getopt(count, words, "p:b:u:c:s:n:r:w:g:e:m:h:")) != -1;) switch (option) {
            case 'p': port = atoi(optarg); break;
            case 'b': body_file = optarg; break;
            case 'u': path = optarg; break;
            case 'h': header = optarg; break;
            case 'c': connections = atoi(optarg); break;
            case 's': seconds = atof(optarg); break;
            case 'n': most = strtoull(optarg, NULL, 10); break;
            case 'r': per_s = atof(optarg); break;
            case 'w': wait_ns = atof(optarg) * 1000; break;
            case 'g': stagger_ns = atof(optarg) * 1000; break;
            case 'e': report_s = atof(optarg); break;
            case 'm': report_requests = strtoull(optarg, NULL, 10); break;
            default: exit(2);
        }
    if (!port || !body_file || connections < 1) {
        fprintf(stderr, "usage: %s -p PORT -b BODY ...; its source says the rest\n", words[0]);
        exit(2);
    }
}

int main(int count, char **words) {
    read_options(count, words);
    make_request();
    poller = epoll_create1(EPOLL_CLOEXEC);
    all = calloc(connections, sizeof *all);
    started = total.since = recent.since = now_ns();
    for (int i = 0; i < connections; i++) {
        all[i].fd = -1;
        all[i].due = started + stagger_ns * i / connections;
    }
    struct epoll_event events[256];
    for (;;) {
        int64_t wait = ask_due();
        if (stopped && !busy()) break;
        int64_t now = now_ns();
        if (report_s > 0) {
            int64_t left = recent.since + (int64_t)(report_s * 1e9) - now;
            if (left <= 0) {
                print(&recent, now);
                continue;
            }
            if (wait < 0 || left < wait) wait = left;
        }
        struct timespec until = {wait / 1000000000, wait % 1000000000};
        int ready = epoll_pwait2(poller, events, 256, wait < 0 ? NULL : &until, NULL);
        for (int i = 0; i < ready; i++) hear(events[i].data.ptr);
    }
    print(&total, now_ns());
    return 0;
}
