#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

template <typename T, int kWidth>
struct SwigluForward {
  Rows<T, kWidth> gate, up, out;

  struct Loaded {
    Vector<T, kWidth> gate, up;
  };
  __device__ Loaded load(int64_t row, int64_t i) const {
    return {gate.load(row, i), up.load(row, i)};
  }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    Vector<T, kWidth> result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float g = to_float(in.gate.at[e]);
      result.at[e] = from_float<T>(g * sigmoid(g) * to_float(in.up.at[e]));
    }
    out.store(row, i, result);
  }
};

template <typename T, int kWidth>
struct SwigluBackward {
  Rows<T, kWidth> gate, up, dout, dgate, dup;

  struct Loaded {
    Vector<T, kWidth> gate, up, dout;
  };
  __device__ Loaded load(int64_t row, int64_t i) const {
    return {gate.load(row, i), up.load(row, i), dout.load(row, i)};
  }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    Vector<T, kWidth> to_gate, to_up;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float g = to_float(in.gate.at[e]), d = to_float(in.dout.at[e]), s = sigmoid(g);
      to_gate.at[e] = from_float<T>(d * to_float(in.up.at[e]) * s * (1 + g * (1 - s)));
      to_up.at[e] = from_float<T>(d * g * s);
    }
    dgate.store(row, i, to_gate);
    dup.store(row, i, to_up);
  }
};

}  // namespace

void swiglu_forward(cudaStream_t stream, const Tensor& gate, const Tensor& up, const Tensor& out) {
  with_element("swiglu_forward: out", out, [&]<typename T>(T) {
    require_dtype("swiglu_forward: gate", gate, out.dtype());
    require_dtype("swiglu_forward: up", up, out.dtype());
    with_width<16 / int(sizeof(T))>({&gate, &up, &out}, [&](auto width) {
      using AnyRows = Rows<T, width()>;
      launch_map("swiglu_forward",
                 SwigluForward<T, width()>{AnyRows(gate), AnyRows(up), AnyRows(out)}, gate.dim(0),
                 gate.dim(1) / width(), stream);
    });
  });
}

void swiglu_backward(cudaStream_t stream, const Tensor& gate, const Tensor& up, const Tensor& dout,
                     const Tensor& dgate, const Tensor& dup) {
  with_element("swiglu_backward: dout", dout, [&]<typename T>(T) {
    require_dtype("swiglu_backward: gate", gate, dout.dtype());
    require_dtype("swiglu_backward: up", up, dout.dtype());
    require_dtype("swiglu_backward: dgate", dgate, dout.dtype());
    require_dtype("swiglu_backward: dup", dup, dout.dtype());
    with_width<16 / int(sizeof(T))>({&gate, &up, &dout, &dgate, &dup}, [&](auto width) {
      using AnyRows = Rows<T, width()>;
      launch_map("swiglu_backward",
                 SwigluBackward<T, width()>{AnyRows(gate), AnyRows(up), AnyRows(dout),
                                            AnyRows(dgate), AnyRows(dup)},
                 gate.dim(0), gate.dim(1) / width(), stream);
    });
  });
}

}  // namespace tandem::gpu
