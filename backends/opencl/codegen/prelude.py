"""The OpenCL C that every generated kernel may use: half storage, Philox, and functions that vectorise.

Storage of half precision is 16-bit integers: fp16 by `vload_half` and `vstore_half_rte`, which need no `cl_khr_fp16`,
and bf16 by shifts, rounded to nearest even. Arithmetic is float. The functions have no branches, so that a compiler
for CPUs can run 8 or 16 of them at once.
"""

PRELUDE = r"""
#ifdef HAS_DOUBLE
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

#ifdef __clang__
#define REASSOCIATE _Pragma("clang fp reassociate(on)")
#else
#define REASSOCIATE
#endif

static inline float load_bf16(ushort bits) { return as_float((uint)bits << 16); }
static inline ushort store_bf16(float value) {
  uint bits = as_uint(value);
  uint rounded = (bits + ((bits >> 16) & 1u) + 0x7FFFu) >> 16;
  uint quiet = (bits >> 16) | 0x40u;
  return (ushort)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}
static inline float round_bf16(float value) { return load_bf16(store_bf16(value)); }

/* fp16 in integer arithmetic, rounded to nearest even. */
static inline ushort store_half(float value) {
  uint bits = as_uint(value);
  uint sign = (bits >> 16) & 0x8000u;
  uint size = bits & 0x7FFFFFFFu;
  uint normal = (size + 0xFFFu + ((size >> 13) & 1u) - 0x38000000u) >> 13;
  /* Below 2^-14: adding 0.5 leaves the subnormal's bits at the end of the sum, rounded by the hardware. */
  uint small = as_uint(as_float(size) + 0.5f) - 0x3F000000u;
  uint result = size < 0x38800000u ? small : normal;
  result = size >= 0x477FF000u ? 0x7C00u : result;
  result = size > 0x7F800000u ? (0x7E00u | ((size >> 13) & 0x3FFu)) : result;
  return (ushort)(sign | result);
}
static inline float load_half(ushort stored) {
  uint bits = stored;
  uint sign = (bits & 0x8000u) << 16;
  uint size = (bits & 0x7FFFu) << 13;
  float scaled = as_float(size) * 0x1p112f;
  uint special = size | 0x7F800000u;
  uint result = size >= 0x0F800000u ? special : as_uint(scaled);
  return as_float(sign | result);
}
static inline float round_half(float value) { return load_half(store_half(value)); }

static inline float exp_f(float x) {
  float inside = fmin(fmax(x, -104.0f), 89.0f);
  float n = rint(inside * 1.44269504f);
  float r = fma(n, -0.693145752f, inside);
  r = fma(n, -1.42860677e-6f, r);
  float p = 1.98412698e-4f;
  p = fma(p, r, 1.38888889e-3f);
  p = fma(p, r, 8.33333333e-3f);
  p = fma(p, r, 4.16666667e-2f);
  p = fma(p, r, 1.66666667e-1f);
  p = fma(p, r, 0.5f);
  p = fma(p, r * r, r) + 1.0f;
  int whole = (int)n;
  int first = whole >> 1;
  float y = p * as_float((first + 127) << 23) * as_float((whole - first + 127) << 23);
  return x != x ? x : y;
}
/* The first to come writes; the number is in the lower half of the first long, the devices being little-endian. */
static inline void report_fault(__global long* fault, long number, long index) {
  if (atomic_cmpxchg((volatile __global int*)fault, 0, (int)number) == 0) fault[1] = index;
}
static inline float sigmoid_f(float x) { return 1.0f / (1.0f + exp_f(-x)); }
static inline float expm1_f(float x) {
  float small = 1.98412698e-4f;
  small = fma(small, x, 1.38888889e-3f);
  small = fma(small, x, 8.33333333e-3f);
  small = fma(small, x, 4.16666667e-2f);
  small = fma(small, x, 1.66666667e-1f);
  small = fma(small, x, 0.5f);
  small = fma(small, x * x, x);
  return fabs(x) < 0.34f ? small : exp_f(x) - 1.0f;
}
static inline float tanh_f(float x) {
  float size = fabs(x);
  float twice = expm1_f(2.0f * fmin(size, 20.0f));
  float y = twice / (twice + 2.0f);
  return x != x ? x : copysign(y, x);
}
/* A rational function on [-4, 4], outside which float32 has +-1: the coefficients of Eigen's and XLA's erf. */
static inline float erf_f(float x) {
  float c = fmin(fmax(x, -4.0f), 4.0f);
  float s = c * c;
  float p = -2.72614225801306e-10f;
  p = fma(p, s, 2.77068142495902e-08f);
  p = fma(p, s, -2.10102402082508e-06f);
  p = fma(p, s, -5.69250639462346e-05f);
  p = fma(p, s, -7.34990630326855e-04f);
  p = fma(p, s, -2.95459980854025e-03f);
  p = fma(p, s, -1.60960333262415e-02f);
  float q = -1.45660718464996e-05f;
  q = fma(q, s, -2.13374055278905e-04f);
  q = fma(q, s, -1.68282697438203e-03f);
  q = fma(q, s, -7.37332916720468e-03f);
  q = fma(q, s, -1.42647390514189e-02f);
  return x != x ? x : c * p / q;
}

/* Floats as integers in their order; NaN above (or below) all, so that it wins. */
static inline int ordered_(float value) { int bits = as_int(value); return bits ^ ((bits >> 31) & 0x7FFFFFFF); }
static inline int ordered_high(float value) { return value != value ? INT_MAX : ordered_(value); }
static inline int ordered_low(float value) { return value != value ? INT_MIN : ordered_(value); }
static inline float unordered(int order) { return as_float(order ^ ((order >> 31) & 0x7FFFFFFF)); }

static inline long floor_divide_l(long a, long b) {
  if (b == 0) return 0;
  if (b == -1) return (long)(0 - (ulong)a);
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
/* Python's way, which PyTorch follows: exact where the quotient by a rounded division is not. */
#define FLOOR_DIVIDE(name, real)                       \
  static inline real name(real a, real b) {            \
    if (b == 0) return a / b;                          \
    real rest = fmod(a, b);                            \
    real whole = (a - rest) / b;                       \
    if (rest != 0 && (b < 0) != (rest < 0)) whole -= 1; \
    if (whole == 0) return copysign((real)0, a / b);   \
    real below = floor(whole);                         \
    return whole - below > (real)0.5 ? below + 1 : below; \
  }
FLOOR_DIVIDE(floor_divide_f, float)
#ifdef HAS_DOUBLE
FLOOR_DIVIDE(floor_divide_d, double)
#endif

static inline long llpow(long base, long exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
  ulong result = 1, factor = (ulong)base;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= factor;
    factor *= factor;
  }
  return (long)result;
}

static inline uint4 philox(uint block, uint c1, uint c2, uint c3, uint k0, uint k1) {
  uint w0 = block, w1 = c1, w2 = c2, w3 = c3;
  for (int round = 0; round < 10; round++) {
    ulong p0 = (ulong)w0 * 0xD2511F53u;
    ulong p1 = (ulong)w2 * 0xCD9E8D57u;
    uint n0 = (uint)(p1 >> 32) ^ w1 ^ k0;
    uint n2 = (uint)(p0 >> 32) ^ w3 ^ k1;
    w1 = (uint)p1;
    w3 = (uint)p0;
    w0 = n0;
    w2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (uint4)(w0, w1, w2, w3);
}
"""
