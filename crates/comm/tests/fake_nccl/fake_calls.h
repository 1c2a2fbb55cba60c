// The calls that move data; the second part of fake_nccl.c.

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, struct comm *c, void *stream) {
  int code = enter(c, "ncclAllReduce");
  if (code != SUCCESS) return code;
  note(c, "all_reduce %zu %s %s on %p\n", count, TYPES[type], OPS[op], stream);
  return meet(c, (struct call){ALL_REDUCE, count, type, op, send, receive, 0, 0, NULL});
}

int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, struct comm *c, void *stream) {
  int code = enter(c, "ncclReduceScatter");
  if (code != SUCCESS) return code;
  note(c, "reduce_scatter %zu %s %s on %p\n", count, TYPES[type], OPS[op], stream);
  return meet(c, (struct call){REDUCE_SCATTER, count, type, op, send, receive, 0, 0, NULL});
}

int ncclAllGather(const void *send, void *receive, size_t count, int type, struct comm *c, void *stream) {
  int code = enter(c, "ncclAllGather");
  if (code != SUCCESS) return code;
  note(c, "all_gather %zu %s on %p\n", count, TYPES[type], stream);
  return meet(c, (struct call){ALL_GATHER, count, type, 0, send, receive, 0, 0, NULL});
}

int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, struct comm *c, void *stream) {
  int code = enter(c, "ncclBroadcast");
  if (code != SUCCESS) return code;
  note(c, "broadcast %zu %s from %d on %p\n", count, TYPES[type], root, stream);
  return meet(c, (struct call){BROADCAST, count, type, root, send, receive, 0, 0, NULL});
}

// Sends and receipts of the group that this thread has begun.
struct half {
  int sends, peer, type, done;
  size_t count;
  void *data;
  struct post *post;
};
static __thread int depth;
static __thread int halves;
static __thread struct half pending[4 * RANKS];
static __thread struct comm *pending_comm;

static int add(const char *function, int sends, void *data, size_t count, int type, int peer, struct comm *c, void *stream) {
  int code = enter(c, function);
  if (code != SUCCESS) return code;
  // Stricter than NCCL: alone it would be a group by itself, which for a send to oneself hangs.
  if (depth == 0 || (halves && pending_comm != c) || peer >= c->group->size || halves == 4 * RANKS)
    return leave(c, INVALID_USAGE);
  note(c, "%s %zu %s %s %d on %p\n", sends ? "send" : "recv", count, TYPES[type], sends ? "to" : "from", peer, stream);
  pending[halves++] = (struct half){sends, peer, type, 0, count, data, NULL};
  pending_comm = c;
  return leave(c, SUCCESS);
}

int ncclSend(const void *data, size_t count, int type, int peer, struct comm *c, void *stream) {
  return add("ncclSend", 1, (void *)data, count, type, peer, c, stream);
}

int ncclRecv(void *data, size_t count, int type, int peer, struct comm *c, void *stream) {
  return add("ncclRecv", 0, data, count, type, peer, c, stream);
}

int ncclGroupStart(void) { return depth++, SUCCESS; }

// Takes what has come for a receipt, if it has.
static int take(struct comm *c, struct half *half) {
  for (struct post *post = c->group->posts; post; post = post->next) {
    if (post->done || post->from != half->peer || post->to != c->rank) continue;
    post->bad = post->count != half->count || post->type != half->type;
    if (!post->bad) memcpy(half->data, post->data, half->count * bytes(half->type));
    post->done = half->done = 1;
    pthread_cond_broadcast(&changed);
    return post->bad ? INVALID_USAGE : SUCCESS;
  }
  return SUCCESS;
}

int ncclGroupEnd(void) {
  if (depth == 0) return INVALID_USAGE;
  if (--depth > 0 || halves == 0) return SUCCESS;
  int count = halves;
  struct comm *c = pending_comm;
  halves = 0;
  int code = enter(c, "ncclGroupEnd");
  if (code != SUCCESS) return code;
  for (int i = 0; i < count; i++) {
    struct half *half = &pending[i];
    if (!half->sends) continue;
    struct post *post = half->post = calloc(1, sizeof *post), **last = &c->group->posts;
    *post = (struct post){c->rank, half->peer, half->type, 0, 0, half->count, half->data, NULL};
    while (*last) last = &(*last)->next;
    *last = post;
  }
  pthread_cond_broadcast(&changed);
  for (;;) {
    int missing = 0;
    for (int i = 0; i < count; i++) {
      int taken = pending[i].sends || pending[i].done ? SUCCESS : take(c, &pending[i]);
      if (taken != SUCCESS) code = taken;
    }
    // After the receipts, as one may send to oneself.
    for (int i = 0; i < count; i++) {
      struct half *half = &pending[i];
      if (half->sends && half->post->done) {
        half->done = 1;
        if (half->post->bad) code = INVALID_USAGE;
      }
      missing |= !half->done;
    }
    if (given_up) code = SYSTEM_ERROR;
    if (!missing || c->aborted || given_up) break;
    pthread_cond_wait(&changed, &lock);
  }
  // Nobody reads the buffers after this.
  for (int i = 0; i < count; i++)
    if (pending[i].post) pending[i].post->done = 1;
  if (code != SUCCESS) {
    snprintf(said, sizeof said, "what is sent and what is awaited differ");
    c->async = code;
  }
  return leave(c, code);
}
