#include "tandem/cross_attention.h"

#include <fmt/format.h>

#include <atomic>
#include <cmath>
#include <string>
#include <utility>

#include "comm/agreement.h"
#include "core/operands.h"
#include "gemm/gemm.h"
#include "kernels/cpu/attention_rows.h"
#include "overlap/attention/operator.h"
#include "overlap/contract/check.h"
#include "tandem/error.h"

namespace tandem {

namespace {

constexpr std::string_view kCross = "cross_attention";

/// Layers of this process so far.
std::atomic<uint64_t> layers{0};

std::string describe(const CrossAttentionShape& s) {
  return fmt::format(
      "batch {} text {} visual {} hidden {} features {} heads {} kv_heads {} "
      "head_dim {} {}{}",
      s.batch, s.text, s.visual, s.hidden, s.features, s.heads, s.kv_heads, s.head_dim,
      name_of(s.dtype), s.gate ? " gate" : "");
}

/// Sizes that are this layer's; the operator checks those of its heads.
void check_sizes(const CrossAttentionShape& s) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"text", s.text}, {"visual", s.visual}, {"hidden", s.hidden}, {"features", s.features}};
  for (const auto& [name, size] : sizes) {
    if (size >= 1 && size <= int64_t{1} << 30) continue;
    throw InvalidArgument(fmt::format("{}: {} {}: expected 1 to 2^30", kCross, name, size));
  }
}

ContextShape attention_shape(Communicator& comm, const CrossAttentionShape& s) {
  const std::string refusal = failure_of([&] { check_sizes(s); });
  comm.require_same(kCross, refusal.empty() ? describe(s) : refusal);
  if (!refusal.empty()) throw InvalidArgument(refusal);
  return {.batch = s.batch,
          .seq = s.text,
          .keys = s.visual,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .head_dim = s.head_dim,
          .dtype = s.dtype,
          .causal = false,
          .split = schedule::ContextSplit::contiguous};
}

/// Calls body(element of a, element of b) in order, in f32; matrices of equal shape.
template <typename Body>
void for_each_pair(const Tensor& a, const Tensor& b, const Body& body) {
  cpu::with_type(a.dtype(), kCross.data(), [&]<typename A>(A) {
    cpu::with_type(b.dtype(), kCross.data(), [&]<typename B>(B) {
      for (int64_t row = 0; row < a.dim(0); ++row) {
        A* const left = a.as<A>() + row * a.stride(0);
        B* const right = b.as<B>() + row * b.stride(0);
        for (int64_t c = 0; c < a.dim(1); ++c) body(left[c], right[c]);
      }
    });
  });
}

/// to <- from x scale.
void scale(const Tensor& from, float scale, const Tensor& to) {
  for_each_pair(from, to, [&]<typename F, typename T>(F& value, T& scaled) {
    scaled = cpu::from_f32<T>(cpu::to_f32(value) * scale);
  });
}

/// A matrix in `memory`, which is replaced where it is too small.
Tensor grown(Memory& memory, DType dtype, int64_t rows, int64_t columns) {
  const size_t needed = size_t(rows * columns) * size_of(dtype);
  if (memory.bytes() < needed) memory = Memory(needed);
  return memory.view(dtype, {rows, columns});
}

}  // namespace

class CrossAttentionRows {
 public:
  /// Reserves memory for the rows of a layer.
  void reserve(const ContextGrid& grid) {
    const ContextShape& s = grid.shape;
    const int64_t rows = grid.queries(grid.rank).count();
    q = grown(q_memory_, s.dtype, s.batch * rows, grid.q_columns());
    attended = grown(attended_memory_, s.dtype, s.batch * rows, grid.q_columns());
    log_sums = grown(log_sums_memory_, DType::f32, s.batch * s.heads, rows);
  }
  size_t bytes() const {
    return q_memory_.bytes() + attended_memory_.bytes() + log_sums_memory_.bytes();
  }

  Tensor q, attended, log_sums;
  uint64_t filled_by = 0;  ///< number of a layer; 0: none

 private:
  Memory q_memory_, attended_memory_, log_sums_memory_;
};

class CrossAttentionOnRanks {
 public:
  CrossAttentionOnRanks(Communicator& comm, const CrossAttentionShape& shape,
                        const ContextAttentionOptions& options)
      : shape_(shape),
        attention_(comm, attention_shape(comm, shape), nullptr,
                   {options.strategy, options.form, options.backward, 0, options.strict}),
        text_(shape.batch * attention_.query_rows().count()),
        visual_(shape.batch * attention_.key_rows().count()) {
    const int64_t q = attention_.grid().q_columns(), kv = attention_.grid().kv_columns();
    k_ = grown(k_memory_, shape.dtype, visual_, kv);
    v_ = grown(v_memory_, shape.dtype, visual_, kv);
    if (shape.gate) projected_ = grown(projected_memory_, DType::f32, text_, shape.hidden);
    if (!options.backward) return;
    dq_ = grown(dq_memory_, shape.dtype, text_, q);
    dattended_ = grown(dattended_memory_, shape.dtype, text_, q);
    dk_ = grown(dk_memory_, shape.dtype, visual_, kv);
    dv_ = grown(dv_memory_, shape.dtype, visual_, kv);
    if (shape.gate) scaled_ = grown(scaled_memory_, shape.dtype, text_, shape.hidden);
    if (shape.dtype == DType::f32) return;
    dvisual_sum_ = grown(dvisual_memory_, DType::f32, visual_, shape.features);
  }

  ContextOperator& attention() { return attention_; }

  void forward(const Tensor& x, const Tensor& visual, const CrossAttentionWeights& w,
               const Tensor& out, CrossAttentionRows& saved) {
    check_inputs(x, visual, w);
    check("out", out, text_, shape_.hidden, shape_.dtype);
    require_outputs_apart({{"out", &out}}, x, visual, w);
    saved.filled_by = 0;
    saved.reserve(attention_.grid());
    gemm(x, w.q.transposed(), saved.q);
    project(visual, w);
    attention_.forward(saved.q, k_, v_, saved.attended, saved.log_sums);
    const Tensor& projected = shape_.gate ? projected_ : out;
    gemm(saved.attended, w.out.transposed(), projected);
    if (shape_.gate) scale(projected_, gate(w), out);
    saved.filled_by = number_;
  }

  void backward(const CrossAttentionRows& saved, const Tensor& dout, const Tensor& x,
                const Tensor& visual, const CrossAttentionWeights& w, const Tensor& dx,
                const Tensor& dvisual, const CrossAttentionWeights& d) {
    check_backward(saved, dout, x, visual, w, dx, dvisual, d);
    if (shape_.gate) {
      gemm(saved.attended, w.out.transposed(), projected_);
      double sum = 0;
      for_each_pair(dout, projected_, [&](auto& gradient, auto& projected) {
        sum += double(cpu::to_f32(gradient)) * cpu::to_f32(projected);
      });
      const double tanh = std::tanh(double(*w.gate.as<float>()));
      *d.gate.as<float>() = float(sum * (1 - tanh * tanh));
      scale(dout, gate(w), scaled_);
    }
    const Tensor& dprojected = shape_.gate ? scaled_ : dout;
    gemm(dprojected.transposed(), saved.attended, d.out);
    gemm(dprojected, w.out, dattended_);
    project(visual, w);
    attention_.backward(saved.q, k_, v_, saved.attended, saved.log_sums, dattended_, dq_, dk_, dv_);
    gemm(dq_.transposed(), x, d.q);
    gemm(dq_, w.q, dx);
    gemm(dk_.transposed(), visual, d.k);
    gemm(dv_.transposed(), visual, d.v);
    if (dvisual.dims() == 0) return;
    if (shape_.dtype == DType::f32) {
      gemm(dk_, w.k, dvisual);
      return gemm(dv_, w.v, dvisual, {.accumulate = true});
    }
    gemm(dk_, w.k, dvisual_sum_);
    gemm(dv_, w.v, dvisual_sum_, {.accumulate = true});
    scale(dvisual_sum_, 1, dvisual);
  }

 private:
  static float gate(const CrossAttentionWeights& w) { return std::tanh(*w.gate.as<float>()); }

  void project(const Tensor& visual, const CrossAttentionWeights& w) {
    gemm(visual, w.k.transposed(), k_);
    gemm(visual, w.v.transposed(), v_);
  }

  static void check(const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                    DType dtype, DType other) {
    check_rows(kCross, name, tensor, rows, columns, dtype, other);
  }
  static void check(const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                    DType dtype) {
    check(name, tensor, rows, columns, dtype, dtype);
  }
  void check_weights(const CrossAttentionWeights& w, const std::string& prefix, DType other) const {
    const int64_t q = attention_.grid().q_columns(), kv = attention_.grid().kv_columns();
    const auto matrix = [&](const char* name, const Tensor& tensor, int64_t rows, int64_t columns) {
      check((prefix + name).c_str(), tensor, rows, columns, shape_.dtype, other);
    };
    matrix("q", w.q, q, shape_.hidden);
    matrix("k", w.k, kv, shape_.features);
    matrix("v", w.v, kv, shape_.features);
    matrix("out", w.out, shape_.hidden, q);
    if (shape_.gate) return check_vector(kCross, prefix + "gate", w.gate, 1, DType::f32);
    if (w.gate.dims() == 0) return;
    throw InvalidArgument(fmt::format("{}: {}gate is {}: expected none of a shape without gate",
                                      kCross, prefix, w.gate.describe()));
  }
  void check_inputs(const Tensor& x, const Tensor& visual, const CrossAttentionWeights& w) const {
    check("x", x, text_, shape_.hidden, shape_.dtype);
    check("visual", visual, visual_, shape_.features, shape_.dtype);
    check_weights(w, "weights.", shape_.dtype);
  }
  /// Requires each output to be writable and to overlap no other operand.
  static void require_outputs_apart(std::initializer_list<Operand> outputs, const Tensor& x,
                                    const Tensor& visual, const CrossAttentionWeights& w,
                                    const Tensor* dout = nullptr) {
    require_apart(kCross, outputs,
                  {{"x", &x},
                   {"visual", &visual},
                   {"weights.q", &w.q},
                   {"weights.k", &w.k},
                   {"weights.v", &w.v},
                   {"weights.out", &w.out},
                   {"weights.gate", present(w.gate)},
                   {"dout", dout}});
  }
  static const Tensor* present(const Tensor& tensor) {
    return tensor.dims() > 0 ? &tensor : nullptr;
  }
  void check_backward(const CrossAttentionRows& saved, const Tensor& dout, const Tensor& x,
                      const Tensor& visual, const CrossAttentionWeights& w, const Tensor& dx,
                      const Tensor& dvisual, const CrossAttentionWeights& d) const {
    if (attention_.backward_form().empty()) {
      throw InvalidArgument(
          fmt::format("{}: backward pass: expected a layer made with backward", kCross));
    }
    if (saved.filled_by != number_) {
      throw InvalidArgument(fmt::format(
          "{}: batch: expected one that a forward pass of this layer has filled", kCross));
    }
    check_inputs(x, visual, w);
    check("dout", dout, text_, shape_.hidden, shape_.dtype);
    check("dx", dx, text_, shape_.hidden, shape_.dtype);
    if (dvisual.dims() > 0) check("dvisual", dvisual, visual_, shape_.features, shape_.dtype);
    check_weights(d, "gradients.", DType::f32);
    require_outputs_apart({{"dx", &dx},
                           {"dvisual", present(dvisual)},
                           {"gradients.q", &d.q},
                           {"gradients.k", &d.k},
                           {"gradients.v", &d.v},
                           {"gradients.out", &d.out},
                           {"gradients.gate", present(d.gate)}},
                          x, visual, w, &dout);
  }

  const uint64_t number_ = ++layers;
  CrossAttentionShape shape_;
  ContextOperator attention_;
  int64_t text_, visual_;  // rows of this rank
  Memory k_memory_, v_memory_, projected_memory_, dq_memory_, dattended_memory_, dk_memory_,
      dv_memory_, scaled_memory_, dvisual_memory_;
  Tensor k_, v_, projected_, dq_, dattended_, dk_, dv_, scaled_, dvisual_sum_;
};

CrossAttentionBatch::CrossAttentionBatch() : rows_(std::make_unique<CrossAttentionRows>()) {}
CrossAttentionBatch::~CrossAttentionBatch() = default;
CrossAttentionBatch::CrossAttentionBatch(CrossAttentionBatch&&) noexcept = default;
CrossAttentionBatch& CrossAttentionBatch::operator=(CrossAttentionBatch&&) noexcept = default;
size_t CrossAttentionBatch::bytes() const {
  return rows_ ? rows_->bytes() : 0;
}

namespace {
CrossAttentionOnRanks& used(const std::unique_ptr<CrossAttentionOnRanks>& impl) {
  if (impl) return *impl;
  throw InvalidArgument(fmt::format("{}: called on a layer that was moved from", kCross));
}
}  // namespace

CrossAttention::CrossAttention(Communicator& comm, const CrossAttentionShape& shape,
                               const ContextAttentionOptions& options)
    : impl_(std::make_unique<CrossAttentionOnRanks>(comm, shape, options)) {}
CrossAttention::~CrossAttention() = default;
CrossAttention::CrossAttention(CrossAttention&&) noexcept = default;
CrossAttention& CrossAttention::operator=(CrossAttention&&) noexcept = default;

void CrossAttention::forward(const Tensor& x, const Tensor& visual,
                             const CrossAttentionWeights& weights, const Tensor& out,
                             CrossAttentionBatch& batch) {
  if (!batch.rows_) batch = CrossAttentionBatch();  // it was moved from
  used(impl_).forward(x, visual, weights, out, *batch.rows_);
}

void CrossAttention::backward(const CrossAttentionBatch& batch, const Tensor& dout, const Tensor& x,
                              const Tensor& visual, const CrossAttentionWeights& weights,
                              const Tensor& dx, const Tensor& dvisual,
                              const CrossAttentionWeights& gradients) {
  CrossAttentionOnRanks& layer = used(impl_);
  static const CrossAttentionRows kMovedFrom;
  layer.backward(batch.rows_ ? *batch.rows_ : kMovedFrom, dout, x, visual, weights, dx, dvisual,
                 gradients);
}

std::string_view CrossAttention::forward_form() const {
  return used(impl_).attention().forward_form();
}
std::string_view CrossAttention::backward_form() const {
  return used(impl_).attention().backward_form();
}
int64_t CrossAttention::forward_bytes() const {
  return used(impl_).attention().sent_bytes(ContextPass::forward);
}
int64_t CrossAttention::backward_bytes() const {
  return used(impl_).attention().sent_bytes(ContextPass::backward);
}

}  // namespace tandem
