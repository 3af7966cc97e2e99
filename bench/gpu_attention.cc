#include "bench/gpu_attention.h"

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/cuda/cudnn/attention.h"
#include "kernels/cuda/hopper_attention.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr int64_t kHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr int64_t kWide = kHeads * kHeadDim, kNarrow = kKvHeads * kHeadDim;
constexpr int64_t kQkv = kWide + 2 * kNarrow;
constexpr double kTheta = 500000;
constexpr int kAttentionRepeats = 10;
constexpr std::string_view kUnordered = "cudnn_unordered";
constexpr double kMaxDifference = 0.02;  // root mean square; bf16 rounds by 0.004

/// Random in [-1, 1), without a period.
Memory random_rows(int64_t rows, int64_t columns, uint64_t seed) {
  Memory memory(size_t(rows * columns) * sizeof(BFloat16));
  auto* const values = reinterpret_cast<BFloat16*>(memory.data());
  for (int64_t i = 0; i < rows * columns; ++i) {
    values[i] = BFloat16::from_float(uniform(seed, 0, uint64_t(i)) * 2 - 1);
  }
  return memory;
}

using Make = std::function<std::unique_ptr<gpu::FusedAttention>()>;

/// One form with its own tensors: fused ones rotate q and k in place.
class Form {
 public:
  /// Without `make`: the simple kernels.
  Form(std::string_view name, const Exec& exec, const AttentionShape& shape, const RopeTable& rope,
       const Memory& qkv, const Memory& dout, const Make& make)
      : name_(name),
        exec_(exec),
        rows_(shape.batch * shape.seq),
        qkv_(qkv.bytes(), exec.device),
        dqkv_(qkv.bytes(), exec.device),
        out_(dout.bytes(), exec.device),
        dout_(dout.bytes(), exec.device),
        log_sums_(size_t(rows_ * kHeads) * sizeof(float), exec.device) {
    copy(exec, matrix(qkv, kQkv), matrix(qkv_, kQkv));
    copy(exec, matrix(dout, kWide), matrix(dout_, kWide));
    if (make) {
      fused_ = make();
    } else {
      simple_ = std::make_unique<Attention>(exec, shape, rope);
    }
  }
  std::string_view name() const { return name_; }
  bool missing() const { return !fused_ && !simple_; }

  void forward() const {
    const auto [q, k, v] = split(qkv_);
    const Tensor out = matrix(out_, kWide), sums = log_sums();
    if (simple_) return simple_->forward(exec_, q, k, v, out, sums);
    fused_->forward(exec_, q, k, v, out, sums, 0);
  }
  void backward() const {
    const auto [q, k, v] = split(qkv_);
    const auto [dq, dk, dv] = split(dqkv_);
    const Tensor out = matrix(out_, kWide), dout = matrix(dout_, kWide), sums = log_sums();
    if (simple_) return simple_->backward(exec_, q, k, v, out, sums, dout, dq, dk, dv);
    fused_->backward(exec_, {q, k, v, out, sums, dout, dq, dk, dv}, 0);
  }
  Tensor out() const { return matrix(out_, kWide); }
  Tensor gradients() const { return matrix(dqkv_, kQkv); }

 private:
  struct Views {
    Tensor q, k, v;
  };
  Tensor matrix(const Memory& memory, int64_t columns) const {
    return memory.view(DType::bf16, {rows_, columns});
  }
  Tensor log_sums() const { return log_sums_.view(DType::f32, {rows_ * kHeads, 1}); }
  Views split(const Memory& memory) const {
    const Tensor all = matrix(memory, kQkv);
    return {all.narrow(1, 0, kWide), all.narrow(1, kWide, kNarrow),
            all.narrow(1, kWide + kNarrow, kNarrow)};
  }

  std::string_view name_;
  Exec exec_;
  int64_t rows_;
  Memory qkv_, dqkv_, out_, dout_, log_sums_;
  std::unique_ptr<Attention> simple_;
  std::unique_ptr<gpu::FusedAttention> fused_;
};

void require_equal(const Exec& exec, const char* what, const Form& form, const Tensor& found,
                   const Tensor& expected) {
  const double off =
      gpu::difference(gpu::read(found, exec.stream), gpu::read(expected, exec.stream));
  if (off <= kMaxDifference) return;
  throw std::runtime_error(fmt::format("{}: {}: results are wrong by {}", what, form.name(), off));
}

void print_times(const char* op, const AttentionShape& shape, double flops,
                 const std::vector<gpu::Candidate>& forms) {
  for (const gpu::Candidate& form : forms) {
    const double us = gpu::median(form.us);
    fmt::print(
        "{{\"op\": \"{}\", \"form\": \"{}\", \"batch\": {}, \"seq\": {}, \"us\": {:.1f}, "
        "\"tflops\": {:.1f}}}\n",
        op, form.name, shape.batch, shape.seq, us, flops / us / 1e6);
  }
  std::fflush(stdout);
}

void bench_shape(const Exec& exec, const gpu::Flush& flush, int64_t batch, int64_t seq) {
  const AttentionShape shape{batch, seq, kHeads, kKvHeads, kHeadDim};
  const RopeTable rope(exec, seq, kHeadDim, kTheta);
  const Memory qkv = random_rows(batch * seq, kQkv, 1), dout = random_rows(batch * seq, kWide, 2);
  const AttentionRows ordered{DType::bf16, kQkv, kWide}, unordered{DType::bf16, kQkv, kWide, false};
  std::vector<std::unique_ptr<Form>> forms;
  const auto add = [&](std::string_view name, const Make& make) {
    auto form = std::make_unique<Form>(name, exec, shape, rope, qkv, dout, make);
    if (!form->missing()) forms.push_back(std::move(form));
  };
  add("simple", {});
  if (gpu::why_not_hopper_attention(shape, ordered).empty()) {
    add("hopper", [&] { return gpu::make_hopper_attention(exec, shape, rope, ordered); });
  }
  add("cudnn", [&] { return gpu::make_cudnn_attention(exec, shape, rope, ordered); });
  add(kUnordered, [&] { return gpu::make_cudnn_attention(exec, shape, rope, unordered); });
  std::vector<gpu::Candidate> forward, backward;
  for (const auto& form : forms) {
    form->forward();
    form->backward();
    require_equal(exec, "attention_forward", *form, form->out(), forms[0]->out());
    require_equal(exec, "attention_backward", *form, form->gradients(), forms[0]->gradients());
    // The forward passes of cuDNN's two forms are the same.
    if (form->name() != kUnordered) {
      forward.push_back({std::string(form->name()), [&form] { form->forward(); }, {}});
    }
    backward.push_back({std::string(form->name()), [&form] { form->backward(); }, {}});
  }
  const double flops = 2.0 * double(batch * kHeads * kHeadDim) * double(seq) * double(seq);
  gpu::measure(forward, kAttentionRepeats, flush, exec.stream);
  print_times("attention_forward", shape, flops, forward);
  gpu::measure(backward, kAttentionRepeats, flush, exec.stream);
  print_times("attention_backward", shape, 2.5 * flops, backward);
}

}  // namespace

void bench_attention(const Exec& exec, const gpu::Flush& flush) {
  bench_shape(exec, flush, 4, 2048);
  bench_shape(exec, flush, 1, 8192);
}

}  // namespace tandem
