#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/elementwise.h"

namespace tandem::gpu {
namespace {

template <typename T, int kWidth>
struct Add {
  Rows<float, kWidth> x;
  Rows<T, kWidth> y;
  Rows<float, kWidth> out;

  struct Loaded {
    Vector<float, kWidth> x;
    Vector<T, kWidth> y;
  };
  __device__ Loaded load(int64_t row, int64_t i) const { return {x.load(row, i), y.load(row, i)}; }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    Vector<float, kWidth> result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result.at[e] = in.x.at[e] + to_float(in.y.at[e]);
    out.store(row, i, result);
  }
};

template <typename T, int kWidth, size_t kMaxTerms>
struct Sum {
  const T* terms[kMaxTerms];
  int num_terms;
  Rows<T, kWidth> out;

  using Loaded = Vector<T, kWidth>;
  __device__ Loaded load(int64_t, int64_t i) const {
    const auto term = [&](int t) { return reinterpret_cast<const Loaded*>(terms[t])[i]; };
    const Loaded first = term(0);
    Vector<float, kWidth> total;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) total.at[e] = to_float(first.at[e]);
    for (int t = 1; t < num_terms; ++t) {
      const Loaded next = term(t);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) total.at[e] += to_float(next.at[e]);
    }
    Loaded result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result.at[e] = from_float<T>(total.at[e]);
    return result;
  }
  __device__ void store(int64_t row, int64_t i, const Loaded& total) const {
    out.store(row, i, total);
  }
};

template <typename From, typename To, int kWidth>
struct Cast {
  Rows<From, kWidth> from;
  Rows<To, kWidth> to;

  using Loaded = Vector<From, kWidth>;
  __device__ Loaded load(int64_t row, int64_t i) const { return from.load(row, i); }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    Vector<To, kWidth> result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result.at[e] = from_float<To>(to_float(in.at[e]));
    to.store(row, i, result);
  }
};

/// Casts matrices, or vectors as one row.
template <typename From, typename To>
void cast_rows(const Tensor& from, const Tensor& to, cudaStream_t stream) {
  constexpr int kMaxWidth = 16 / int(std::max(sizeof(From), sizeof(To)));
  with_width<kMaxWidth>({&from, &to}, [&](auto width) {
    launch_map("cast", Cast<From, To, width()>{Rows<From, width()>(from), Rows<To, width()>(to)},
               from.dims() == 1 ? 1 : from.dim(0), from.dim(-1) / width(), stream);
  });
}

}  // namespace

void add(cudaStream_t stream, const Tensor& x, const Tensor& y, const Tensor& out) {
  require_dtype("add: x", x, DType::f32);
  require_dtype("add: out", out, DType::f32);
  with_element("add: y", y, [&]<typename T>(T) {
    with_width<4>({&x, &y, &out}, [&](auto width) {
      using Floats = Rows<float, width()>;
      launch_map("add", Add<T, width()>{Floats(x), Rows<T, width()>(y), Floats(out)}, x.dim(0),
                 x.dim(1) / width(), stream);
    });
  });
}

void sum(cudaStream_t stream, std::span<const Tensor> terms, const Tensor& out) {
  const auto launch = [&]<typename T, int kWidth, size_t kMaxTerms>() {
    Sum<T, kWidth, kMaxTerms> body{{}, int(terms.size()), Rows<T, kWidth>(out)};
    for (size_t t = 0; t < terms.size(); ++t) body.terms[t] = terms[t].as<T>();
    launch_map("sum", body, 1, out.elements() / kWidth, stream);
  };
  // Arguments of a kernel: a launch copies all of them.
  const auto with_room = [&]<int kWidth>() {
    with_element("sum: out", out, [&]<typename T>(T) {
      if (terms.size() <= 16) return launch.template operator()<T, kWidth, 16>();
      if (terms.size() <= 256) return launch.template operator()<T, kWidth, 256>();
      launch.template operator()<T, kWidth, kMaxGpuSumTerms>();
    });
  };
  const bool has_vectors =
      have_vectors(4, {&out}) &&
      std::ranges::all_of(terms, [](const Tensor& t) { return have_vectors(4, {&t}); });
  if (has_vectors) return with_room.template operator()<4>();
  with_room.template operator()<1>();
}

void cast(cudaStream_t stream, const Tensor& from, const Tensor& to) {
  with_element("cast: from", from, [&]<typename From>(From) {
    with_element("cast: to", to, [&]<typename To>(To) {
      if (!from.contiguous() || !to.contiguous()) return cast_rows<From, To>(from, to, stream);
      const int64_t elements = from.elements();
      const Tensor source(from.data(), from.dtype(), {elements}, from.device());
      const Tensor target(to.data(), to.dtype(), {elements}, to.device());
      constexpr int64_t kMaxWidth = 8;
      const int64_t whole = elements / kMaxWidth * kMaxWidth;
      cast_rows<From, To>(source.rows(0, whole), target.rows(0, whole), stream);
      cast_rows<From, To>(source.rows(whole, elements - whole),
                          target.rows(whole, elements - whole), stream);
    });
  });
}

}  // namespace tandem::gpu
