// Rows of matrices in vectors, and the two forms of kernels over them: one thread per vector, or
// one block per row, whose sums have a fixed order.
#pragma once

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "core/cuda/check.h"
#include "core/cuda/early_start.cuh"
#include "core/cuda/element.cuh"
#include "core/cuda/silu.cuh"
#include "tandem/error.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

/// kWidth elements, accessed together: 4 to 16 bytes, or one element.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T at[kWidth];
};

namespace detail {
template <size_t kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
}  // namespace detail

/// A vector whose elements share registers until they are unpacked.
template <typename T, int kWidth>
struct PackedVector {
  detail::Word<sizeof(Vector<T, kWidth>)> word;
  __device__ Vector<T, kWidth> unpack() const { return std::bit_cast<Vector<T, kWidth>>(word); }
};

/// Matrix whose rows are accessed in vectors.
template <typename T, int kWidth>
struct Rows {
  T* data;
  int64_t stride;

  explicit Rows(const Tensor& tensor)
      : data(tensor.as<T>()), stride(tensor.dims() > 1 ? tensor.stride(0) : 0) {}
  __device__ Vector<T, kWidth> load(int64_t row, int64_t i) const {
    return reinterpret_cast<const Vector<T, kWidth>*>(data + row * stride)[i];
  }
  __device__ PackedVector<T, kWidth> load_packed(int64_t row, int64_t i) const {
    return reinterpret_cast<const PackedVector<T, kWidth>*>(data + row * stride)[i];
  }
  __device__ void store(int64_t row, int64_t i, const Vector<T, kWidth>& value) const {
    reinterpret_cast<Vector<T, kWidth>*>(data + row * stride)[i] = value;
  }
};

/// Whether every row of the tensors starts at a vector of `width` elements and has only whole ones.
/// A tensor of one dimension is one row.
inline bool have_vectors(int width, std::initializer_list<const Tensor*> tensors) {
  return std::ranges::all_of(tensors, [&](const Tensor* t) {
    const size_t bytes = size_t(width) * size_of(t->dtype());
    return reinterpret_cast<uintptr_t>(t->data()) % bytes == 0 && t->dim(-1) % width == 0 &&
           (t->dims() == 1 || t->stride(0) % width == 0);
  });
}

/// Calls body(std::integral_constant<int, width>): kWidth if the tensors have such vectors, else 1.
template <int kWidth, typename Body>
void with_width(std::initializer_list<const Tensor*> tensors, const Body& body) {
  if (have_vectors(kWidth, tensors)) {
    body(std::integral_constant<int, kWidth>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

/// Throws InvalidArgument unless the tensor has that dtype. `name`: "kernel: tensor".
inline void require_dtype(const char* name, const Tensor& tensor, DType dtype) {
  if (tensor.dtype() == dtype) return;
  throw InvalidArgument(std::string(name) + " " + tensor.describe() + ": expected " +
                        std::string(name_of(dtype)));
}

/// Throws InvalidArgument unless the tensor has that shape.
inline void require_shape(const char* name, const Tensor& tensor,
                          std::initializer_list<int64_t> shape) {
  const Tensor expected(nullptr, tensor.dtype(), shape);
  bool equal = tensor.dims() == expected.dims();
  for (int i = 0; equal && i < tensor.dims(); ++i) equal = tensor.dim(i) == expected.dim(i);
  if (equal) return;
  throw InvalidArgument(std::string(name) + " " + tensor.describe() + ": expected " +
                        expected.describe());
}

/// Calls body(T{}) with the tensor's element type. Throws InvalidArgument unless it is f32 or bf16.
template <typename Body>
void with_element(const char* name, const Tensor& tensor, const Body& body) {
  if (tensor.dtype() == DType::f32) return body(float{});
  if (tensor.dtype() == DType::bf16) return body(__nv_bfloat16{});
  throw InvalidArgument(std::string(name) + " " + tensor.describe() + ": expected f32 or bf16");
}

// One thread per vector.

constexpr int kMapThreads = 256;
constexpr int kMapVectors = 2;  // vectors of a thread whose loads are in flight together

/// Passes body.load(row, i) to body.store(row, i, loaded) for every vector i of every row.
template <typename Body>
__global__ void __launch_bounds__(kMapThreads)
    map_kernel(const Body body, int64_t rows, int64_t vectors) {
  let_next_start();
  wait_for_previous();
  const int64_t first = int64_t(blockIdx.x) * blockDim.x * kMapVectors + threadIdx.x;
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    typename Body::Loaded loaded[kMapVectors];
#pragma unroll
    for (int k = 0; k < kMapVectors; ++k) {
      const int64_t i = first + k * int(blockDim.x);
      if (i < vectors) loaded[k] = body.load(row, i);
    }
#pragma unroll
    for (int k = 0; k < kMapVectors; ++k) {
      const int64_t i = first + k * int(blockDim.x);
      if (i < vectors) body.store(row, i, loaded[k]);
    }
  }
}

template <typename Body>
void launch_map(const char* name, const Body& body, int64_t rows, int64_t vectors,
                cudaStream_t stream) {
  if (rows == 0 || vectors == 0) return;
  unsigned across = 1;
  while (across < kMapThreads && across * kMapVectors < vectors) across *= 2;
  const unsigned down = kMapThreads / across;
  constexpr int64_t kMaxGridY = 65535;
  const dim3 grid(unsigned((vectors - 1) / (across * kMapVectors) + 1),
                  unsigned(std::min(kMaxGridY, (rows - 1) / down + 1)));
  launch_early(name, map_kernel<Body>, grid, dim3(across, down), 0, stream, true, body, rows,
               vectors);
}

// One block per row.

constexpr int kMaxRowThreads = 1024;
constexpr int kCachedVectors = 4;  // max vectors of a row that a thread keeps in registers

/// Threads of a block whose registers hold the row, if 1024 can.
inline unsigned row_threads(int64_t vectors) {
  const int64_t warps = (vectors - 1) / (kCachedVectors * 32) + 1;
  return unsigned(std::clamp(warps * 32, int64_t(32), int64_t(kMaxRowThreads)));
}

/// Calls body(k, i) for the thread's k-th vector, i in its row, while it keeps them in registers.
template <typename Body>
__device__ void for_each_cached(int64_t vectors, const Body& body) {
#pragma unroll
  for (int k = 0; k < kCachedVectors; ++k) {
    const int64_t i = threadIdx.x + int64_t(k) * blockDim.x;
    if (i < vectors) body(k, i);
  }
}

/// Calls body(i) for the thread's other vectors.
template <typename Body>
__device__ void for_each_further(int64_t vectors, const Body& body) {
  for (int64_t i = threadIdx.x + int64_t(kCachedVectors) * blockDim.x; i < vectors;
       i += blockDim.x) {
    body(i);
  }
}

struct Plus {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

using WarpValues = float[kMaxRowThreads / 32];

/// `value` of all threads of a block of whole warps combined, returned to every thread.
/// `warp_values`: shared memory that the block's last call did not use.
template <typename Combine>
__device__ float combine_block(float value, const Combine& combine, WarpValues& warp_values) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  }
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  float result = warp_values[0];
  for (int w = 1; w < int(blockDim.x / 32); ++w) result = combine(result, warp_values[w]);
  return result;
}

/// With memory for one call by a kernel.
template <typename Combine>
__device__ float combine_block(float value, const Combine& combine) {
  __shared__ WarpValues warp_values;
  return combine_block(value, combine, warp_values);
}

}  // namespace tandem::gpu
