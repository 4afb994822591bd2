/* Moves the clock of a process: CLOCK_AHEAD seconds are added to the time of day. For LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void) {
    const char *seconds = getenv("CLOCK_AHEAD");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec moment;
    clock_gettime(CLOCK_REALTIME, &moment);
    now->tv_sec = moment.tv_sec;
    now->tv_usec = moment.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec moment;
    clock_gettime(CLOCK_REALTIME, &moment);
    if (seconds) *seconds = moment.tv_sec;
    return moment.tv_sec;
}
