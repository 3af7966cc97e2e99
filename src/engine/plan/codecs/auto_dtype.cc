#include "engine/plan/codecs/auto_dtype.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "comm/exec.h"
#include "core/random_buffer.h"
#include "engine/config/device_traits.h"
#include "gemm/gemm.h"
#include "tune/measure.h"

namespace tandem {
namespace {

// Max FLOPs of one GEMM: its cost per row is stable at that size.
constexpr int64_t kMaxFlops = int64_t(1) << 31;

/// y = x wᵀ, dx = dy w, dw += dyᵀ x, as training computes them.
class Products {
 public:
  Products(DType dtype, int64_t m, int64_t n, int64_t k)
      : m_(std::clamp<int64_t>(kMaxFlops / std::max<int64_t>(2 * n * k, 1), 16, m)),
        scale_(double(m) / double(m_)),
        dtype_(dtype),
        n_(n),
        k_(k),
        x_(random_buffer(dtype, m_ * k, 1)),
        w_(random_buffer(dtype, n * k, 2)),
        dy_(random_buffer(dtype, m_ * n, 3)),
        y_(size_t(m_ * n) * size_of(dtype)),
        dx_(size_t(m_ * k) * size_of(dtype)),
        dw_(size_t(n * k) * sizeof(float)) {}

  void run() {
    const Tensor x = x_.view(dtype_, {m_, k_}), w = w_.view(dtype_, {n_, k_});
    const Tensor dy = dy_.view(dtype_, {m_, n_});
    gemm(x, w.transposed(), y_.view(dtype_, {m_, n_}));
    gemm(dy, w, dx_.view(dtype_, {m_, k_}));
    gemm(dy.transposed(), x, dw_.view(DType::f32, {n_, k_}), {nullptr, true});
  }
  /// Ratio of the real work to the measured work.
  double scale() const { return scale_; }

 private:
  int64_t m_;
  double scale_;
  DType dtype_;
  int64_t n_, k_;
  Memory x_, w_, dy_, y_, dx_, dw_;
};

struct Shape {
  int64_t n, k;
  double times;
};

std::vector<Shape> gemm_shapes(const ModelConfig& model, int64_t tp) {
  const int64_t heads = model.heads + 2 * model.kv_heads;
  const auto shard = [&](int64_t whole) { return std::max<int64_t>(1, whole / tp); };
  const auto layers = double(model.layers), moe = double(model.moe_layers());
  const double of_experts = moe * double(model.top_k);
  return {{shard(heads * model.head_dim), model.hidden, layers},
          {model.hidden, shard(model.heads * model.head_dim), layers},
          {shard(2 * model.ffn), model.hidden, layers - moe},
          {model.hidden, shard(model.ffn), layers - moe},
          {shard(2 * model.ffn_per_expert()), model.hidden, of_experts},
          {model.hidden, shard(model.ffn_per_expert()), of_experts},
          {shard(model.vocab), model.hidden, 1}};
}

}  // namespace

std::string DTypeChoice::describe() const {
  if (f32_ms == 0) return fmt::format("train.dtype auto: {}, as on every GPU", name_of(dtype));
  return fmt::format(
      "train.dtype auto: {} (matrix products of a microbatch: f32 {:.2f} ms, bf16 "
      "{:.2f} ms)",
      name_of(dtype), f32_ms, bf16_ms);
}

DType faster_dtype(double f32_ms, double bf16_ms) {
  return bf16_ms < 0.8 * f32_ms ? DType::bf16 : DType::f32;
}

DTypeChoice choose_dtype(Communicator& world, const ModelConfig& model, int64_t tp,
                         int64_t tokens) {
  if (const auto dtype = device_traits(make_exec(world)).auto_dtype) return {.dtype = *dtype};
  DTypeChoice choice;
  for (const Shape& shape : gemm_shapes(model, tp)) {
    Products f32(DType::f32, tokens, shape.n, shape.k);
    Products bf16(DType::bf16, tokens, shape.n, shape.k);
    const std::vector<std::function<void()>> variants{[&] { f32.run(); }, [&] { bf16.run(); }};
    const auto samples = measure(world, variants, {1, 3, 9, 0.1});
    choice.f32_ms += median(samples[0]) * 1e3 * shape.times * f32.scale();
    choice.bf16_ms += median(samples[1]) * 1e3 * shape.times * bf16.scale();
  }
  choice.dtype = faster_dtype(choice.f32_ms, choice.bf16_ms);
  return choice;
}

}  // namespace tandem
