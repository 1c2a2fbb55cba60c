// Sums in the order of the ranks, in f32 or wider, as the engines of the host make them; a part of fake_nccl.c.

static float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static uint16_t to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#define SAME(x) (x)
#define REDUCE(element, wide, from, to)                                                     \
  for (size_t i = 0; i < count; i++) {                                                      \
    wide result = from(((const element *)g->calls[0].send)[i]);                             \
    for (int r = 1; r < g->size; r++) {                                                     \
      wide value = from(((const element *)g->calls[r].send)[i]);                            \
      result = op == MAX ? (value > result ? value : result) : (wide)(result + value);      \
    }                                                                                       \
    ((element *)into)[i] = to(op == AVG ? (wide)(result / g->size) : result);               \
  }

static int reduce(struct group *g, size_t count, int type, int op, void *into) {
  switch (type) {
  case U8: REDUCE(uint8_t, uint8_t, SAME, SAME) break;
  case I32: // Sums wrap.
    if (op == MAX) REDUCE(int32_t, int32_t, SAME, SAME) else REDUCE(uint32_t, uint32_t, SAME, SAME) break;
  case I64:
    if (op == MAX) REDUCE(int64_t, int64_t, SAME, SAME) else REDUCE(uint64_t, uint64_t, SAME, SAME) break;
  case U64: REDUCE(uint64_t, uint64_t, SAME, SAME) break;
  case F16: REDUCE(_Float16, float, (float), (_Float16)) break;
  case F32: REDUCE(float, float, SAME, SAME) break;
  case F64: REDUCE(double, double, SAME, SAME) break;
  case BF16: REDUCE(uint16_t, float, from_bf16, to_bf16) break;
  default: return INVALID_ARGUMENT;
  }
  return SUCCESS;
}
