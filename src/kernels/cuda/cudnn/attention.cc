#include "kernels/cuda/cudnn/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/cuda/share.h"
#include "core/system/env.h"
#include "kernels/attention/simple_attention.h"
#include "kernels/cuda/cudnn/groups.h"
#include "kernels/cuda/cudnn/plugin_loader.h"
#include "kernels/cuda/rope.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

using Handle = std::unique_ptr<TandemCudnnHandle, void (*)(TandemCudnnHandle*)>;
using Plan = std::unique_ptr<TandemCudnnPlan, void (*)(TandemCudnnPlan*)>;

TandemCudnnShape make_shape(const AttentionShape& shape, const AttentionRows& rows,
                            TandemCudnnPass pass, int64_t window) {
  return {.batch = shape.batch,
          .seq = shape.seq,
          .heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .qkv_stride = rows.qkv_stride,
          .out_stride = rows.out_stride,
          .scale = float(1 / std::sqrt(double(shape.head_dim))),
          .pass = pass,
          .deterministic = rows.deterministic,
          .window = window};
}

class CudnnAttention final : public FusedAttention {
 public:
  /// Throws Unsupported if cuDNN has no kernels for the tensors.
  CudnnAttention(const Exec& exec, const AttentionShape& shape, const RopeTable& rope,
                 const AttentionRows& rows, const TandemCudnn& cudnn, int64_t max_workspace)
      : FusedAttention(exec, rows),
        shape_(shape),
        rope_(rope),
        cudnn_(cudnn),
        group_(rows.deterministic ? choose_group(shape, max_workspace)
                                  : AttentionGroup{shape.batch, shape.kv_heads}),
        handle_(built(cudnn.create_handle(exec.stream)), cudnn.destroy_handle),
        plans_(make_plans()),
        workspace_(workspace_bytes(), exec.device) {}

  void forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& out, const Tensor& log_sums, const AttentionMask& mask) override {
    check_forward(exec, q, k, v, out, log_sums, mask.window);
    check_rotated(q, k);
    rotate(stream_, rope_, shape_.seq, Rotation::forward, q, k);
    run_forward(q, k, v, out, log_sums, mask.window);
  }

  void forward_again(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& out, const Tensor& log_sums,
                     const AttentionMask& mask) override {
    check_forward(exec, q, k, v, out, log_sums, mask.window);
    run_forward(q, k, v, out, log_sums, mask.window);
  }

  void backward(const Exec& exec, const AttentionGradients& t, const AttentionMask& mask) override {
    const Plans& plans = find_plans(mask.window);
    check_stream(exec);
    for (const auto& [name, tensor] : {std::pair("q", &t.q),
                                       {"k", &t.k},
                                       {"v", &t.v},
                                       {"dq", &t.dq},
                                       {"dk", &t.dk},
                                       {"dv", &t.dv}}) {
      check_rows(name, *tensor, rows_.qkv_stride);
    }
    check_rows("out", t.out, rows_.out_stride);
    check_rows("dout", t.dout, rows_.out_stride);
    check_log_sums(t.log_sums);
    for (int64_t sequence = 0; sequence < shape_.batch; sequence += group_.batch) {
      for (int64_t head = 0; head < shape_.kv_heads; head += group_.kv_heads) {
        run(plans.backward, group_tensors(t, sequence, head));
      }
    }
    rotate(stream_, rope_, shape_.seq, Rotation::back, t.dq, t.dk);
  }

 private:
  struct Plans {
    Plan forward, backward;
  };

  template <typename T>
  T* built(T* result) const {
    if (result) return result;
    throw Unsupported(std::string("cuDNN: ") + cudnn_.error_text());
  }
  Plan make_plan(const TandemCudnnShape& shape) const {
    return {built(cudnn_.create_plan(handle_.get(), &shape)), cudnn_.destroy_plan};
  }
  std::map<int64_t, Plans> make_plans() const {
    AttentionShape group_shape = shape_;
    group_shape.batch = group_.batch, group_shape.kv_heads = group_.kv_heads;
    group_shape.heads = group_.kv_heads * query_heads();
    std::map<int64_t, Plans> plans;
    for (const int64_t any_window : rows_.windows) {
      const int64_t window = effective_window(shape_, any_window);
      if (plans.contains(window)) continue;
      plans.emplace(window,
                    Plans{make_plan(make_shape(shape_, rows_, kTandemCudnnForward, window)),
                          make_plan(make_shape(group_shape, rows_, kTandemCudnnBackward, window))});
    }
    return plans;
  }
  size_t workspace_bytes() const {
    int64_t bytes = 0;
    for (const auto& [window, plans] : plans_) {
      bytes = std::max({bytes, cudnn_.workspace_bytes(plans.forward.get()),
                        cudnn_.workspace_bytes(plans.backward.get())});
    }
    return size_t(bytes);
  }
  const Plans& find_plans(int64_t window) const {
    const auto found = plans_.find(effective_window(shape_, window));
    if (found != plans_.end()) return found->second;
    throw InvalidArgument(
        fmt::format("attention: window {}: expected one that it was made for", window));
  }
  int64_t query_heads() const { return shape_.heads / shape_.kv_heads; }

  void check_forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& out, const Tensor& log_sums, int64_t window) const {
    find_plans(window);  // throws if there are none
    check_stream(exec);
    check_rows("q", q, rows_.qkv_stride);
    check_rows("k", k, rows_.qkv_stride);
    check_rows("v", v, rows_.qkv_stride);
    check_rows("out", out, rows_.out_stride);
    check_log_sums(log_sums);
  }
  void run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                   const Tensor& log_sums, int64_t window) const {
    TandemCudnnTensors tensors{};
    tensors.q = q.data(), tensors.k = k.data(), tensors.v = v.data();
    tensors.out = out.data(), tensors.log_sums = log_sums.as<float>();
    run(find_plans(window).forward, tensors);
  }

  void run(const Plan& plan, const TandemCudnnTensors& tensors) const {
    if (cudnn_.run(plan.get(), &tensors, workspace_.data()) == 0) return;
    throw DeviceError(std::string("attention: cuDNN: ") + cudnn_.error_text());
  }

  /// Tensors from a sequence and a key head on.
  TandemCudnnTensors group_tensors(const AttentionGradients& t, int64_t sequence,
                                   int64_t kv_head) const {
    const int64_t row = sequence * shape_.seq, head = kv_head * query_heads();
    const auto at = [&](const Tensor& tensor, int64_t first_head) {
      return static_cast<void*>(tensor.as<BFloat16>() + row * tensor.stride(0) +
                                first_head * shape_.head_dim);
    };
    return {.q = at(t.q, head),
            .k = at(t.k, kv_head),
            .v = at(t.v, kv_head),
            .out = at(t.out, head),
            .log_sums = t.log_sums.as<float>() + (sequence * shape_.heads + head) * shape_.seq,
            .dout = at(t.dout, head),
            .dq = at(t.dq, head),
            .dk = at(t.dk, kv_head),
            .dv = at(t.dv, kv_head)};
  }

  AttentionShape shape_;
  const RopeTable& rope_;
  const TandemCudnn& cudnn_;
  AttentionGroup group_;  // of a run of the backward pass
  Handle handle_;
  std::map<int64_t, Plans> plans_;  // by window
  Memory workspace_;
};

}  // namespace

std::unique_ptr<FusedAttention> make_cudnn_attention(const Exec& exec, const AttentionShape& shape,
                                                     const RopeTable& rope,
                                                     const AttentionRows& rows,
                                                     int64_t max_workspace) {
  if (shape.batch * shape.seq * shape.heads == 0) return nullptr;
  std::string reason =
      why_simple_attention(shape, rows, {env().gpu_portable, !this_share()->alone()});
  if (reason.empty()) reason = cudnn_plugin().absent;
  if (reason.empty()) {
    try {
      return std::make_unique<CudnnAttention>(exec, shape, rope, rows, *cudnn_plugin().functions,
                                              max_workspace);
    } catch (const Unsupported& error) {
      reason = error.what();
    }
  }
  note_simple_attention(reason);
  return nullptr;
}

std::string describe_cudnn() {
  const CudnnPlugin& plugin = cudnn_plugin();
  return plugin.functions ? plugin.version : "absent: " + plugin.absent;
}

}  // namespace tandem::gpu
