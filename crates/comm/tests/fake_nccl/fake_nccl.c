// A stand-in for NCCL: the same functions over plain memory, among threads of one process. A call blocks until all ranks of
// its group have come, and the last of them does it for all, in the order of the ranks. It minds what NCCL would (all ranks call the
// same; nothing is used after its end), and tells the tests what it was asked to do.
//
// Each copy of the file has a state of its own, so that tests don't meet.

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 23007
#endif
#define RANKS 16
#define LOG 65536

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum type { U8 = 1, I32 = 2, I64 = 4, U64 = 5, F16 = 6, F32 = 7, F64 = 8, BF16 = 9 };
enum { SUM = 0, MAX = 2, AVG = 4 };
enum what { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SPLIT };

typedef struct { char internal[128]; } ncclUniqueId;

struct comm;

struct call {
  enum what what;
  size_t count;
  int type, detail; // of a reduction its kind, of a broadcast its root
  const void *send;
  void *receive;
  int colour, key;
  struct comm *part;
};

// Something sent that waits for whoever receives it.
struct post {
  int from, to, type, done, bad;
  size_t count;
  const void *data;
  struct post *next;
};

struct group {
  ncclUniqueId id;
  int size, joined, arrived, result;
  long round;
  struct comm *comms[RANKS];
  struct call calls[RANKS];
  struct post *posts;
  struct group *next;
};

// Never freed, so that a use after its end can be seen.
struct comm {
  struct group *group;
  int rank, first_rank, inside, aborted, ended, async;
  struct comm *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct group *groups;
static struct comm *comms;
static int ids, destroyed, aborted, misuses, hanging, given_up;
static char failing[64];
static int failing_code;
static char said[128];
static char logs[RANKS][LOG];
static ncclUniqueId joined_with[RANKS];

// What tests ask and tell.
int fake_ids(void) { return ids; }
int fake_destroyed(void) { return destroyed; }
int fake_aborted(void) { return aborted; }
int fake_misuses(void) { return misuses; }
const char *fake_log(int rank) { return logs[rank]; }
const char *fake_id(int rank) { return joined_with[rank].internal; }
void fake_hang(int on) { hanging = on; }
// Ends all calls, as a test has failed: the others of its ranks would wait for ever.
void fake_give_up(void) {
  pthread_mutex_lock(&lock);
  given_up = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}
void fake_fail(const char *function, int code) {
  snprintf(failing, sizeof failing, "%s", function);
  failing_code = code;
}
void fake_async(int rank, int code) {
  pthread_mutex_lock(&lock);
  for (struct comm *c = comms; c; c = c->next)
    if (c->first_rank == rank) c->async = code;
  pthread_mutex_unlock(&lock);
}

// One text for the process, like NCCL's. What is said again isn't written again: another rank may be reading it.
static void say(const char *format, ...) {
  static pthread_mutex_t saying = PTHREAD_MUTEX_INITIALIZER;
  char text[sizeof said];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  pthread_mutex_lock(&saying);
  if (strcmp(said, text) != 0) strcpy(said, text);
  pthread_mutex_unlock(&saying);
}

static int fails(const char *function) {
  if (strcmp(failing, function) != 0) return SUCCESS;
  say("the fake was told to\nfail %s", function);
  return failing_code;
}

static void note(struct comm *c, const char *format, ...) {
  char *log = logs[c->first_rank];
  size_t used = strlen(log);
  va_list args;
  va_start(args, format);
  vsnprintf(log + used, LOG - used, format, args);
  va_end(args);
}

static const char *const TYPES[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
static const char *const OPS[] = {"sum", "prod", "max", "min", "avg"};

static size_t bytes(int type) {
  switch (type) {
  case U8: return 1;
  case F16: case BF16: return 2;
  case I32: case F32: return 4;
  default: return 8;
  }
}

// Enters a call, with the lock held if it succeeds.
static int enter(struct comm *c, const char *function) {
  pthread_mutex_lock(&lock);
  int code = fails(function);
  if (c == NULL || c->ended) {
    misuses++;
    code = INVALID_ARGUMENT;
  }
  if (code == SUCCESS) c->inside++;
  else pthread_mutex_unlock(&lock);
  return code;
}

static int leave(struct comm *c, int code) {
  c->inside--;
  if (c->aborted) code = SYSTEM_ERROR;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return code;
}

#include "fake_sums.h"

static struct comm *new_comm(struct group *g, int rank, int first_rank) {
  struct comm *c = calloc(1, sizeof *c);
  *c = (struct comm){.group = g, .rank = rank, .first_rank = first_rank, .next = comms};
  comms = g->comms[rank] = c;
  return c;
}

static void split(struct group *g) {
  for (int r = 0; r < g->size; r++) {
    if (g->calls[r].part) continue;
    // All ranks of this colour, by key and then by rank.
    struct group *part = calloc(1, sizeof *part);
    for (long key = 0;; key++) {
      int more = 0;
      for (int s = r; s < g->size; s++) {
        struct call *call = &g->calls[s];
        if (call->colour != g->calls[r].colour) continue;
        if (call->key == key) call->part = new_comm(part, part->size++, g->comms[s]->first_rank);
        more |= call->key > key;
      }
      if (!more) break;
    }
  }
}

// Does a call that all ranks have come to.
static int perform(struct group *g) {
  struct call *first = &g->calls[0];
  for (int r = 1; r < g->size; r++) {
    struct call *call = &g->calls[r];
    if (call->what != first->what || call->count != first->count || call->type != first->type ||
        call->detail != first->detail) {
      say("rank %d calls something else", r);
      for (int s = 0; s < g->size; s++) g->comms[s]->async = INVALID_USAGE;
      return INVALID_USAGE;
    }
  }
  if (first->what == SPLIT) {
    split(g);
    return SUCCESS;
  }
  size_t part = first->count * bytes(first->type);
  size_t whole = first->what == REDUCE_SCATTER || first->what == ALL_GATHER ? part * g->size : part;
  char *result = malloc(whole + 1);
  int code = SUCCESS;
  if (first->what == ALL_GATHER)
    for (int r = 0; r < g->size; r++) memcpy(result + part * r, g->calls[r].send, part);
  else if (first->what == BROADCAST)
    memcpy(result, g->calls[first->detail].send, part);
  else
    code = reduce(g, whole / bytes(first->type), first->type, first->detail, result);
  for (int r = 0; r < g->size && code == SUCCESS; r++) {
    if (first->what == REDUCE_SCATTER) memcpy(g->calls[r].receive, result + part * r, part);
    else memcpy(g->calls[r].receive, result, whole);
  }
  free(result);
  return code;
}

// Waits for the others, and the last one does the call.
static int meet(struct comm *c, struct call call) {
  struct group *g = c->group;
  while (hanging && !c->aborted && !given_up) pthread_cond_wait(&changed, &lock);
  if (c->aborted || given_up) return leave(c, SYSTEM_ERROR);
  g->calls[c->rank] = call;
  long round = g->round;
  if (++g->arrived == g->size) {
    g->result = perform(g);
    g->arrived = 0;
    g->round++;
    pthread_cond_broadcast(&changed);
  }
  while (g->round == round && !c->aborted && !given_up) pthread_cond_wait(&changed, &lock);
  if (g->round == round) { // Called off: the others wait on, until they are too.
    g->arrived--;
    return leave(c, SYSTEM_ERROR);
  }
  return leave(c, g->result);
}

int ncclGetVersion(int *version) {
  *version = FAKE_VERSION;
  return SUCCESS;
}

const char *ncclGetErrorString(int code) {
  switch (code) {
  case SUCCESS: return "no error";
  case SYSTEM_ERROR: return "unhandled system error";
  case INVALID_USAGE: return "invalid usage";
  default: return "some error";
  }
}

const char *ncclGetLastError(struct comm *c) { return (void)c, said; }

int ncclGetUniqueId(ncclUniqueId *id) {
  int code = fails("ncclGetUniqueId");
  if (code != SUCCESS) return code;
  pthread_mutex_lock(&lock);
  memset(id, 0xa5, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "id %d", ++ids);
  struct group *g = calloc(1, sizeof *g);
  g->id = *id;
  g->next = groups;
  groups = g;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclCommInitRank(struct comm **comm, int size, ncclUniqueId id, int rank) {
  int code = fails("ncclCommInitRank");
  if (code != SUCCESS) return code;
  pthread_mutex_lock(&lock);
  struct group *g = groups;
  while (g && memcmp(&g->id, &id, sizeof id) != 0) g = g->next;
  if (!g || size > RANKS || rank >= size || g->comms[rank] || (g->size && g->size != size)) {
    pthread_mutex_unlock(&lock);
    return INVALID_ARGUMENT;
  }
  g->size = size;
  joined_with[rank] = id;
  *comm = new_comm(g, rank, rank);
  g->joined++;
  pthread_cond_broadcast(&changed);
  while (g->joined < size) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

static int end(struct comm *c, int abort) {
  pthread_mutex_lock(&lock);
  if (c == NULL || c->ended || (!abort && c->inside)) {
    misuses++;
    pthread_mutex_unlock(&lock);
    return INVALID_ARGUMENT;
  }
  c->ended = 1;
  c->aborted = abort;
  *(abort ? &aborted : &destroyed) += 1;
  pthread_cond_broadcast(&changed);
  while (c->inside) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclCommDestroy(struct comm *c) { return end(c, 0); }
int ncclCommAbort(struct comm *c) { return end(c, 1); }

int ncclCommGetAsyncError(struct comm *c, int *error) {
  int code = enter(c, "ncclCommGetAsyncError");
  if (code != SUCCESS) return code;
  *error = c->async;
  return leave(c, SUCCESS);
}

int ncclCommCount(struct comm *c, int *count) { return *count = c->group->size, SUCCESS; }
int ncclCommUserRank(struct comm *c, int *rank) { return *rank = c->rank, SUCCESS; }

#ifndef FAKE_WITHOUT_SPLIT
int ncclCommSplit(struct comm *c, int colour, int key, struct comm **part, void *config) {
  (void)config;
  int code = enter(c, "ncclCommSplit");
  if (code != SUCCESS) return code;
  note(c, "split %d %d\n", colour, key);
  int rank = c->rank;
  struct group *g = c->group;
  code = meet(c, (struct call){.what = SPLIT, .colour = colour, .key = key});
  // Nobody comes to the next call before this rank does.
  if (code == SUCCESS) *part = g->calls[rank].part;
  return code;
}
#endif

#include "fake_calls.h"
