#include "kernels/cuda/rope.h"

#include "core/cuda/load_module.cuh"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

/// Vector i of a row: kWidth pairs of one head, of q's heads first.
template <int kWidth>
struct RotateHeads {
  using Elements = Vector<__nv_bfloat16, kWidth>;
  using Angles = Vector<float, kWidth>;

  Rows<__nv_bfloat16, 1> q, k;
  int q_vectors, half, seq;
  const float *cos, *sin;
  float sign;

  struct Loaded {
    Elements low, high;
    Angles cos, sin;
  };
  __device__ __nv_bfloat16* at(int64_t row, int i) const {
    const bool of_q = i < q_vectors;
    if (!of_q) i -= q_vectors;
    const int vectors = half / kWidth, head = i / vectors;
    __nv_bfloat16* const data = of_q ? q.data : k.data;
    const int64_t stride = of_q ? q.stride : k.stride;
    return data + row * stride + head * 2 * half + (i - head * vectors) * kWidth;
  }
  __device__ Loaded load(int64_t row, int64_t i) const {
    const __nv_bfloat16* x = at(row, int(i));
    const int64_t angle =
        int64_t(unsigned(row) % unsigned(seq)) * half + int(i) % (half / kWidth) * kWidth;
    return {*reinterpret_cast<const Elements*>(x), *reinterpret_cast<const Elements*>(x + half),
            *reinterpret_cast<const Angles*>(cos + angle),
            *reinterpret_cast<const Angles*>(sin + angle)};
  }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    Elements low, high;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float l = to_float(in.low.at[e]), h = to_float(in.high.at[e]);
      const float c = in.cos.at[e], s = sign * in.sin.at[e];
      low.at[e] = from_float<__nv_bfloat16>(l * c - h * s);
      high.at[e] = from_float<__nv_bfloat16>(h * c + l * s);
    }
    __nv_bfloat16* x = at(row, int(i));
    *reinterpret_cast<Elements*>(x) = low;
    *reinterpret_cast<Elements*>(x + half) = high;
  }
};

template <int kWidth>
void launch(cudaStream_t stream, const RopeTable& rope, int64_t seq, Rotation rotation,
            const Tensor& q, const Tensor& k) {
  const int64_t q_vectors = q.dim(1) / (2 * kWidth), k_vectors = k.dim(1) / (2 * kWidth);
  const RotateHeads<kWidth> body{Rows<__nv_bfloat16, 1>(q),
                                 Rows<__nv_bfloat16, 1>(k),
                                 int(q_vectors),
                                 int(rope.half()),
                                 int(seq),
                                 rope.cos(0),
                                 rope.sin(0),
                                 rotation == Rotation::forward ? 1.0f : -1.0f};
  launch_map("rotate", body, q.dim(0), q_vectors + k_vectors, stream);
}

}  // namespace

void rotate(cudaStream_t stream, const RopeTable& rope, int64_t seq, Rotation rotation,
            const Tensor& q, const Tensor& k) {
  require_dtype("rotate: q", q, DType::bf16);
  require_dtype("rotate: k", k, DType::bf16);
  if (rope.half() % 4 != 0 || !have_vectors(8, {&q, &k})) {
    throw InvalidArgument("rotate: q " + q.describe() + " and k " + k.describe() +
                          ": expected heads and rows of multiples of 16 bytes");
  }
  if (rope.half() % 8 == 0) return launch<8>(stream, rope, seq, rotation, q, k);
  launch<4>(stream, rope, seq, rotation, q, k);
}

}  // namespace tandem::gpu
