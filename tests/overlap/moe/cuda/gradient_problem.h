// Backward pass for MoeCase's forward pass: its operands on one rank, and the slow reference (f64)
// over the rows of all ranks.
#pragma once

#include <string>
#include <vector>

#include "overlap/moe/cuda/layer.h"
#include "tests/overlap/moe/cuda/problem.h"

namespace tandem::test {

class MoeGradientCase : public MoeCase {
 public:
  MoeGradientCase(gpu::GpuCommunicator& comm, const MoeShape& s)
      : MoeCase(comm, s),
        dout_on_(upload(stored(s.dtype, dout_of(rank_)))),
        dx_(size_t(s.tokens * s.hidden) * 4),
        dweights_(size_t(s.tokens * s.top_k) * 4),
        dw_in_(size_t(w_in.elements()) * 4),
        dw_out_(size_t(w_out.elements()) * 4) {}

  void route(const MoeRoutes& load, uint64_t seed) {
    MoeCase::route(load, seed);
    load_ = load;
    seed_ = seed;
  }

  Tensor dout() const { return dout_on_.view(shape_.dtype, {rows_, shape_.hidden}); }
  Tensor dx() const { return dx_.view(shape_.dtype, {rows_, shape_.hidden}); }
  Tensor dweights() const { return dweights_.view(DType::f32, {rows_, shape_.top_k}); }
  Tensor dw_in() const { return dw_in_.view(DType::f32, {w_in.dim(0), w_in.dim(1)}); }
  Tensor dw_out() const { return dw_out_.view(DType::f32, {w_out.dim(0), w_out.dim(1)}); }

  void run_backward(gpu::MoeOnGpus& layer, const gpu::MoeSavedActivations& saved,
                    size_t candidate = 0) const {
    layer.run_backward(candidate, dout(), w_in, w_out, saved, dx(), dweights(), dw_in(), dw_out());
  }

  /// Bytes of weight gradients start as `weights`; the others are overwritten.
  void reset(int weights = 0) const {
    for (const gpu::DeviceMemory* memory : {&dx_, &dweights_}) {
      gpu::check(cudaMemsetAsync(memory->data(), 0xff, memory->bytes(), comm_.stream()), "poison");
    }
    for (const gpu::DeviceMemory* memory : {&dw_in_, &dw_out_}) {
      gpu::check(cudaMemsetAsync(memory->data(), weights, memory->bytes(), comm_.stream()),
                 "clear");
    }
  }

  struct Found {
    std::vector<uint16_t> dx;
    std::vector<float> dweights, dw_in, dw_out;
    bool operator==(const Found&) const = default;
  };
  Found found() const {
    return {download<uint16_t>(dx_, rows_ * shape_.hidden),
            download<float>(dweights_, rows_ * shape_.top_k),
            download<float>(dw_in_, w_in.elements()), download<float>(dw_out_, w_out.elements())};
  }

  /// dw_in, then dw_out of a backward pass that stores them as `dtype` over NaNs.
  std::vector<float> stored_gradients(gpu::MoeOnGpus& layer, size_t candidate,
                                      const gpu::MoeSavedActivations& saved, DType dtype) const {
    reset(0xff);
    const auto as = [&](const Tensor& gradient) {
      return Tensor(gradient.data(), dtype, {gradient.dim(0), gradient.dim(1)}, gradient.device());
    };
    layer.run_backward(candidate, dout(), w_in, w_out, saved, dx(), dweights(), as(dw_in()),
                       as(dw_out()), WeightGradients::store);
    std::vector<float> all;
    for (const gpu::DeviceMemory* memory : {&dw_in_, &dw_out_}) {
      const int64_t count = int64_t(memory->bytes() / 4);
      const auto read = dtype == DType::f32 ? download<float>(*memory, count)
                                            : loaded(dtype, download<uint16_t>(*memory, count));
      all.insert(all.end(), read.begin(), read.end());
    }
    return all;
  }
  /// dw_in, then dw_out, rounded to `dtype`.
  static std::vector<float> rounded(const Found& f, DType dtype) {
    std::vector<float> all = f.dw_in;
    all.insert(all.end(), f.dw_out.begin(), f.dw_out.end());
    return dtype == DType::f32 ? all : loaded(dtype, stored(dtype, all));
  }

  /// A training forward pass also rounds gate and up.
  void expect_right(const std::vector<uint16_t>& bits, const std::string& what) const {
    expect_near(expected(), loaded(shape_.dtype, bits), shape_.dtype, what, 2);
  }
  void expect_right(const Found& f, const std::string& what) const {
    const MoeShape& s = shape_;
    const int64_t local_ffn = coords_.ffn, first = shard_of(s.ffn, s.tp, rank_ % s.tp).begin;
    std::vector<double> dw_in(f.dw_in.size(), 0.0), dw_out(f.dw_out.size(), 0.0);
    for (int rank = 0; rank < comm_.size(); ++rank) {
      const int64_t rows = rows_of(load_, rank);
      if (rows == 0) continue;
      const auto chosen = chosen_of(load_, seed_, rank);
      const auto x = x_of(rank), dout = dout_of(rank), weights = weights_of(rank);
      const MoeGradients g =
          moe_reference_backward({.rows = rows,
                                  .hidden = s.hidden,
                                  .ffn = s.ffn,
                                  .experts = s.experts,
                                  .top_k = s.top_k,
                                  .chosen = chosen,
                                  .weights = {weights.data(), size_t(rows * s.top_k)},
                                  .x = {x.data(), size_t(rows * s.hidden)},
                                  .w_in = w_in_,
                                  .w_out = w_out_},
                                 dout);
      if (rank == rank_) {
        expect_near(g.dx, loaded(s.dtype, f.dx), s.dtype, what + ": dx", kRoundings);
        expect_near(g.dweights, f.dweights, s.dtype, what + ": dweights", kRoundings,
                    dweight_size(s.hidden, s.ffn));
      }
      for (int64_t e = 0; e < coords_.experts.count; ++e) {
        const int64_t expert = coords_.experts.begin + e;
        for (int64_t i = 0; i < local_ffn; ++i) {
          for (int64_t h = 0; h < s.hidden; ++h) {
            for (const int64_t half : {0, 1}) {
              dw_in[size_t(((e * 2 + half) * local_ffn + i) * s.hidden + h)] +=
                  g.dw_in[size_t(((expert * 2 + half) * s.ffn + first + i) * s.hidden + h)];
            }
            dw_out[size_t((e * s.hidden + h) * local_ffn + i)] +=
                g.dw_out[size_t((expert * s.hidden + h) * s.ffn + first + i)];
          }
        }
      }
    }
    expect_near(dw_in, f.dw_in, s.dtype, what + ": dw_in", kRoundings);
    expect_near(dw_out, f.dw_out, s.dtype, what + ": dw_out", kRoundings);
  }

 private:
  static constexpr double kRoundings = 2.5;
  std::vector<float> dout_of(int rank) const {
    const int64_t count = shape_.tokens * shape_.hidden;
    return loaded(shape_.dtype, stored(shape_.dtype, random_values(count, 60 + uint64_t(rank), 1)));
  }

  MoeRoutes load_;
  uint64_t seed_ = 0;
  gpu::DeviceMemory dout_on_, dx_, dweights_, dw_in_, dw_out_;
};

}  // namespace tandem::test
