// tandem_cudnn.so: the only source that includes cudnn-frontend, whose headers take a minute to
// compile.
#include "kernels/cuda/cudnn/plugin.h"

#include <cudnn_frontend.h>

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

struct TandemCudnnHandle {
  cudnnHandle_t cudnn = nullptr;
};

struct TandemCudnnPlan {
  cudnnHandle_t cudnn;
  enum TandemCudnnPass pass;
  int64_t workspace_bytes;
  mutable Graph graph;  // execute() is not const
};

namespace {

thread_local std::string last_error;

/// Thrown inside this file only.
struct Failure {
  std::string text;
};

void check(fe::error_t error, const char* step) {
  if (error.is_good()) return;
  const std::string message = error.get_message();
  throw Failure{std::string(step) + ": " + (message.empty() ? "failed without a reason" : message)};
}

void check(cudnnStatus_t status, const char* step) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Failure{std::string(step) + ": " + cudnnGetErrorString(status)};
}

/// Result of body(), or `failed` with the reason in last_error.
template <typename Result, typename Body>
Result guarded(Result failed, const Body& body) noexcept {
  try {
    return body();
  } catch (const Failure& failure) {
    last_error = failure.text;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown exception";
  }
  return failed;
}

enum Id : int64_t { kQ = 1, kK, kV, kOut, kLogSums, kDout, kDq, kDk, kDv };

struct Extents {
  std::vector<int64_t> sizes, strides;
};

Extents rows_extents(const TandemCudnnShape& s, int64_t heads, int64_t row) {
  return {{s.batch, heads, s.seq, s.head_dim}, {s.seq * row, s.head_dim, row, 1}};
}

Extents log_sums_extents(const TandemCudnnShape& s) {
  return {{s.batch, s.heads, s.seq, 1}, {s.heads * s.seq, s.seq, 1, 1}};
}

TensorPtr add_input(Graph& graph, const char* name, Id id, const Extents& extents) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(id)
                          .set_dim(extents.sizes)
                          .set_stride(extents.strides));
}

void set_output(const TensorPtr& tensor, Id id, const Extents& extents) {
  tensor->set_output(true).set_uid(id).set_dim(extents.sizes).set_stride(extents.strides);
}

/// Causal, with the shape's window.
template <typename Attributes>
Attributes masked(const TandemCudnnShape& s) {
  Attributes attributes;
  attributes.set_causal_mask(true);
  if (s.window > 0) attributes.set_diagonal_band_left_bound(int(s.window));
  return attributes;
}

void describe(Graph& graph, const TandemCudnnShape& s) {
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const Extents q_extents = rows_extents(s, s.heads, s.qkv_stride),
                kv_extents = rows_extents(s, s.kv_heads, s.qkv_stride),
                out_extents = rows_extents(s, s.heads, s.out_stride);
  const TensorPtr q = add_input(graph, "q", kQ, q_extents),
                  k = add_input(graph, "k", kK, kv_extents),
                  v = add_input(graph, "v", kV, kv_extents);
  if (s.pass == kTandemCudnnForward) {
    auto [out, log_sums] = graph.sdpa(q, k, v,
                                      masked<fe::graph::SDPA_attributes>(s)
                                          .set_name("attention")
                                          .set_attn_scale(s.scale)
                                          .set_generate_stats(true));
    set_output(out, kOut, out_extents);
    set_output(log_sums, kLogSums, log_sums_extents(s));
    log_sums->set_data_type(fe::DataType_t::FLOAT);
    return;
  }
  const TensorPtr out = add_input(graph, "out", kOut, out_extents),
                  dout = add_input(graph, "dout", kDout, out_extents),
                  log_sums = add_input(graph, "log_sums", kLogSums, log_sums_extents(s));
  log_sums->set_data_type(fe::DataType_t::FLOAT);
  auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, log_sums,
                                          masked<fe::graph::SDPA_backward_attributes>(s)
                                              .set_name("attention_backward")
                                              .set_attn_scale(s.scale)
                                              .set_deterministic_algorithm(s.deterministic != 0));
  set_output(dq, kDq, q_extents);
  set_output(dk, kDk, kv_extents);
  set_output(dv, kDv, kv_extents);
}

/// Everything but loading device code. `cudnn` is nullptr for a device that is only described.
void find_kernels(Graph& graph, cudnnHandle_t cudnn) {
  check(graph.validate(), "validate");
  check(graph.build_operation_graph(cudnn), "build_operation_graph");
  check(graph.create_execution_plans({fe::HeurMode_t::A}), "create_execution_plans");
  check(graph.check_support(), "check_support");
}

const char* error_text() {
  return last_error.c_str();
}

TandemCudnnHandle* create_handle(CUstream_st* stream) {
  return guarded(static_cast<TandemCudnnHandle*>(nullptr), [&] {
    auto handle = std::make_unique<TandemCudnnHandle>();
    check(cudnnCreate(&handle->cudnn), "cudnnCreate");
    if (const cudnnStatus_t status = cudnnSetStream(handle->cudnn, stream)) {
      cudnnDestroy(handle->cudnn);
      check(status, "cudnnSetStream");
    }
    return handle.release();
  });
}

void destroy_handle(TandemCudnnHandle* handle) {
  if (!handle) return;
  cudnnDestroy(handle->cudnn);
  delete handle;
}

TandemCudnnPlan* create_plan(TandemCudnnHandle* handle, const TandemCudnnShape* shape) {
  return guarded(static_cast<TandemCudnnPlan*>(nullptr), [&] {
    auto plan = std::make_unique<TandemCudnnPlan>();
    plan->cudnn = handle->cudnn, plan->pass = shape->pass;
    describe(plan->graph, *shape);
    find_kernels(plan->graph, handle->cudnn);
    // The first that builds, in the heuristics' order: the same in every run.
    check(plan->graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE), "build_plans");
    check(plan->graph.get_workspace_size(plan->workspace_bytes), "get_workspace_size");
    return plan.release();
  });
}

void destroy_plan(TandemCudnnPlan* plan) {
  delete plan;
}

int64_t workspace_bytes(const TandemCudnnPlan* plan) {
  return plan->workspace_bytes;
}

int run(const TandemCudnnPlan* plan, const TandemCudnnTensors* tensors, void* workspace) {
  return guarded(1, [&] {
    const TandemCudnnTensors& t = *tensors;
    std::unordered_map<int64_t, void*> pointers{{kQ, const_cast<void*>(t.q)},
                                                {kK, const_cast<void*>(t.k)},
                                                {kV, const_cast<void*>(t.v)},
                                                {kOut, t.out},
                                                {kLogSums, t.log_sums}};
    if (plan->pass == kTandemCudnnBackward) {
      pointers.insert({{kDout, const_cast<void*>(t.dout)}, {kDq, t.dq}, {kDk, t.dk}, {kDv, t.dv}});
    }
    check(plan->graph.execute(plan->cudnn, pointers, workspace), "execute");
    return 0;
  });
}

int check_shape(const TandemCudnnShape* shape, const char* device, int sm_version) {
  return guarded(1, [&] {
    auto properties = std::make_shared<fe::DeviceProperties>();
    check(properties->deserialize({device, device + std::strlen(device)}), "device");
    Graph graph;
    graph.set_device_properties(properties);
    graph.set_sm_version(sm_version);
    describe(graph, *shape);
    find_kernels(graph, nullptr);
    return 0;
  });
}

}  // namespace

__attribute__((visibility("default"))) const TandemCudnn* tandem_cudnn() {
  static const TandemCudnn functions{.interface_version = kTandemCudnnInterface,
                                     .compiled_version = CUDNN_VERSION,
                                     .running_version = cudnnGetVersion(),
                                     .error_text = error_text,
                                     .create_handle = create_handle,
                                     .destroy_handle = destroy_handle,
                                     .create_plan = create_plan,
                                     .destroy_plan = destroy_plan,
                                     .workspace_bytes = workspace_bytes,
                                     .run = run,
                                     .check_shape = check_shape};
  return &functions;
}
