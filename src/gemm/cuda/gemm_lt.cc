#include "gemm/cuda/gemm_lt.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "core/cuda/fill.h"
#include "gemm/cuda/lt_algorithm.h"
#include "gemm/cuda/simple_gemm.h"

namespace tandem::gpu {
namespace {

constexpr size_t kWorkspace = size_t(64) << 20;

auto key(const GemmShape& s) {
  return std::tuple(s.m, s.n, s.k, s.in, s.out, s.weight_is_kn, s.bias, s.scaling, s.x_is_km,
                    s.accumulate, s.same_bits);
}

constexpr double kFailed = 1e30;

bool nothing_to_do(const GemmShape& s) {
  return s.m == 0 || s.n == 0 || (s.k == 0 && s.accumulate);
}

/// A shape on a number of SMs: the fastest algorithm on a whole GPU may not be it on a share of
/// one.
using GemmKey = std::pair<int, GemmShape>;

std::string key_of(const GemmKey& gemm_key) {
  const auto& [sms, s] = gemm_key;
  int device = 0;
  cudaDeviceProp properties{};
  gpu::check(cudaGetDevice(&device), "current device");
  gpu::check(cudaGetDeviceProperties(&properties, device), "device properties");
  return fmt::format("{}{}, {} SMs | gemm m {} n {} k {} {} to {}{}{}{}{}{}{}",
                     gemm_choice_prefix(), properties.name, sms, s.m, s.n, s.k, name_of(s.in),
                     name_of(s.out), s.weight_is_kn ? " kn" : "", s.bias ? " bias" : "",
                     s.scaling ? fmt::format(" scale per {}", name_of(*s.scaling)) : "",
                     s.x_is_km ? " km" : "", s.accumulate ? " added" : "",
                     s.same_bits ? " same bits" : "");
}

// Choice for a shape, and the contexts (device and share) that it has run in. cuBLASLt loads a
// kernel at its first launch in a context, which may wait for the device while holding a
// process-wide lock: if the running kernel of that device waits for a peer whose thread needs the
// lock, both deadlock.
using GpuContext = std::pair<int, const void*>;
struct Known {
  std::shared_ptr<Selected> selected;
  std::set<GpuContext> contexts;
  std::set<GpuContext> outdated;  // that have run the choice before this one
};
GpuContext this_context() {
  const auto share = this_share();
  return {share->device(), share->context()};
}
std::mutex known_mutex;
std::map<GemmKey, Known> known;
std::vector<GemmKey> timed;   // keys in `known` that were timed here
GemmChoices earlier_choices;  // choices of earlier runs

/// The process's choice if its kernel is loaded here; nullptr if not.
std::shared_ptr<const Selected> selected_here(const GemmKey& key) {
  const std::lock_guard lock(known_mutex);
  const auto found = known.find(key);
  if (found == known.end() || !found->second.contexts.contains(this_context())) return nullptr;
  return found->second.selected;
}

}  // namespace

bool GemmShape::operator<(const GemmShape& other) const {
  return key(*this) < key(other);
}

namespace {

// Handles for reuse: destroying one may wait for the whole device, whose running kernel may belong
// to another rank and wait for this one.
std::mutex handles_mutex;
std::vector<cublasLtHandle_t> idle_handles;

}  // namespace

LtContext::LtContext() : share_(this_share()), workspace_(kWorkspace) {
  const std::lock_guard lock(handles_mutex);
  if (!share_->alone() && !idle_handles.empty()) {
    handle_ = idle_handles.back();
    idle_handles.pop_back();
    return;
  }
  check(cublasLtCreate(&handle_), "cublasLtCreate");
}

LtContext::~LtContext() {
  if (share_->alone()) {
    cublasLtDestroy(handle_);
    return;
  }
  const std::lock_guard lock(handles_mutex);
  idle_handles.push_back(handle_);
}

struct LtGemm::State {
  const LtContext& context;
  GemmShape shape;
  cublasLtMatmulDesc_t op = nullptr;
  Layout weight, x, out;
  std::shared_ptr<const Selected> selected;
  bool is_exact = true;             // `selected` was chosen for this number of rows
  std::optional<Chosen> suggested;  // runs instead of a choice that does not take these rows

  State(const LtContext& context_, const GemmShape& shape_) : context(context_), shape(shape_) {
    // No tf32 for f32: it would lose precision that the caller asked for.
    check(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    const cublasOperation_t weight_op = shape.weight_is_kn ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t x_op = shape.x_is_km ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, weight_op);
    set(CUBLASLT_MATMUL_DESC_TRANSB, x_op);
    if (shape.bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(shape.out));
    }
    if (shape.in == DType::e4m3) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(0));
    weight = shape.weight_is_kn ? make_layout(shape.in, shape.n, shape.k)
                                : make_layout(shape.in, shape.k, shape.n);
    x = shape.x_is_km ? make_layout(shape.in, shape.m, shape.k)
                      : make_layout(shape.in, shape.k, shape.m);
    out = make_layout(shape.out, shape.n, shape.m);
  }
  ~State() { cublasLtMatmulDescDestroy(op); }

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(op, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  }

  void set_scale_modes() {
    if (shape.scaling != Scaling::row) return;
    const auto mode = int32_t(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
    for (const auto which :
         {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE}) {
      if (cublasLtMatmulDescSetAttribute(op, which, &mode, sizeof mode) != CUBLAS_STATUS_SUCCESS) {
        throw Unsupported("gemm: this cuBLASLt has no scales by row");
      }
    }
  }

  // A of cuBLASLt is the weight, B is x.
  void set_scales(const ScalePointers& scales) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales.weight);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales.x);
  }

  cublasStatus_t launch(const Chosen& with, const void* px, const void* pw, void* po,
                        const void* bias, cudaStream_t stream, bool stores = false) const {
    const bool accumulate = shape.accumulate && !stores;
    if (is_simple(with)) {
      GemmShape simple = shape;
      simple.accumulate = accumulate;
      launch_simple_gemm(simple, px, pw, po, bias, stream);
      return CUBLAS_STATUS_SUCCESS;
    }
    const float one = 1, beta = accumulate ? 1 : 0;
    return cublasLtMatmul(context.handle(), op, &one, pw, weight.get(), px, x.get(), &beta, po,
                          out.get(), po, out.get(), &with.algorithm, context.workspace().data(),
                          with.workspace, stream);
  }

  std::vector<Chosen> suggestions() const {
    AlgorithmLimits limits{.workspace = kWorkspace};
    const auto alignment_of = [](int64_t row_bytes) {
      return uint32_t(std::min<int64_t>(256, row_bytes & -row_bytes));
    };
    if (shape.in == DType::e4m3) {  // slices of x and out begin at any row
      limits.x_alignment = alignment_of(shape.k);
      limits.out_alignment = alignment_of(shape.n * int64_t(size_of(shape.out)));
    }
    // Operands of GEMMs that sum over rows may begin at any row, as may those of any number of
    // rows: only 16-byte alignment is guaranteed.
    if (shape.x_is_km || shape.same_bits) {
      limits.weight_alignment = limits.x_alignment = limits.out_alignment = 16;
    }
    if (shape.same_bits) limits.workspace = 0, limits.may_split = false;
    return suggest_algorithms(context.handle(), op, {weight.get(), x.get(), out.get()}, limits);
  }

  [[noreturn]] void refuse() const {
    throw Unsupported(
        fmt::format("gemm: cuBLASLt has no algorithm for M {} N {} K {} in {} out {}{}", shape.m,
                    shape.n, shape.k, name_of(shape.in), name_of(shape.out),
                    shape.scaling == Scaling::row ? " with scales by row" : ""));
  }

  // Operands for trial runs, before the caller's exist.
  struct Scratch {
    DeviceMemory x, weight, out, bias, scales;
    Stream stream;
  };
  Scratch make_scratch() {
    const size_t in = size_of(shape.in), out_bytes = size_t(shape.m * shape.n) * size_of(shape.out);
    Scratch scratch{DeviceMemory(size_t(shape.m * shape.k) * in),
                    DeviceMemory(size_t(shape.n * shape.k) * in),
                    DeviceMemory(out_bytes),
                    DeviceMemory(size_t(shape.n) * 4),
                    DeviceMemory(size_t(shape.m + shape.n) * 4 + 16),
                    Stream()};
    if (shape.bias) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(scratch.bias.data()));
    }
    if (shape.scaling) {
      fill_uniform(scratch.scales.view(DType::f32, {shape.m + shape.n}), 1, 2, 0,
                   scratch.stream.get());
      const auto* scales = reinterpret_cast<const float*>(scratch.scales.data());
      set_scales({scales, scales + (shape.m + 3) / 4 * 4});
    }
    return scratch;
  }
  cublasStatus_t launch_on(const Scratch& on, const Chosen& with) const {
    return launch(with, on.x.data(), on.weight.data(), on.out.data(), on.bias.data(),
                  on.stream.get());
  }

  /// Suggestion that `choice` describes; nullopt if this library does not suggest it for the GEMM
  /// on this GPU.
  std::optional<Chosen> as_chosen(const GemmChoice& choice) const {
    for (const Chosen& chosen : suggestions()) {
      if (choice_of(chosen) == choice) return chosen;
    }
    return std::nullopt;
  }

  /// Saved choice for the GEMM, with its kernel loaded; nullopt if there is none or it does not
  /// run.
  std::optional<Chosen> take_idle() {
    const auto found = earlier_choices.find(key_of({this_share()->sms(), shape}));
    if (found == earlier_choices.end()) return std::nullopt;
    const std::optional<Chosen> chosen = as_chosen(found->second);
    if (!chosen || launch_once(*chosen) != CUBLAS_STATUS_SUCCESS) return std::nullopt;
    return chosen;
  }

  cublasStatus_t launch_once(const Chosen& with) {
    const Scratch scratch = make_scratch();
    const cublasStatus_t code = launch_on(scratch, with);
    gpu::check(cudaStreamSynchronize(scratch.stream.get()), "load a gemm");
    return code;
  }

  /// Loads the kernel on this device before any kernel waits there.
  void load(const Chosen& with) { check(launch_once(with), "cublasLtMatmul"); }

  /// The last rows, up to 16, of the first `rows` of the trial runs' result.
  std::vector<std::byte> last_rows(const Scratch& on, int64_t rows) const {
    const int64_t row_bytes = shape.n * int64_t(size_of(shape.out)),
                  count = std::min<int64_t>(rows, 16);
    std::vector<std::byte> result(size_t(count * row_bytes));
    gpu::check(cudaMemcpyAsync(result.data(), on.out.data() + (rows - count) * row_bytes,
                               result.size(), cudaMemcpyDeviceToHost, on.stream.get()),
               "read a trial's rows");
    gpu::check(cudaStreamSynchronize(on.stream.get()), "gemm candidate");
    return result;
  }

  /// Whether an algorithm takes fewer rows of the filled operands, and gives them the same bits.
  bool keeps_bits(const Scratch& on, const Chosen& with) const {
    const auto multiply = [&](const State& state) {
      const GemmShape& of = state.shape;  // rows that are not written have other bytes
      gpu::check(cudaMemsetAsync(on.out.data(), 0xff, size_t(of.m * of.n) * size_of(of.out),
                                 on.stream.get()),
                 "clear a trial's rows");
      return state.launch(with, on.x.data(), on.weight.data(), on.out.data(), nullptr,
                          on.stream.get(), true) == CUBLAS_STATUS_SUCCESS;
    };
    if (!multiply(*this)) return false;
    std::map<int64_t, std::vector<std::byte>> expected;
    for (const int64_t rows : {1, 8, 65, 100, 200, 513}) {
      if (rows < shape.m) expected.emplace(rows, last_rows(on, rows));
    }
    return std::all_of(expected.begin(), expected.end(), [&](const auto& each) {
      GemmShape fewer = shape;
      fewer.m = each.first;
      return multiply(State(context, fewer)) && last_rows(on, each.first) == each.second;
    });
  }

  Chosen choose() {
    const Scratch scratch = make_scratch();
    const cudaStream_t stream = scratch.stream.get();
    fill_uniform(scratch.x.view(shape.in, {shape.m, shape.k}), 1, 0, 0, stream);
    fill_uniform(scratch.weight.view(shape.in, {shape.n, shape.k}), 1, 1, 0, stream);
    std::vector<Chosen> candidates = suggestions();
    if (shape.same_bits) {
      std::erase_if(candidates, [&](const Chosen& each) { return !keeps_bits(scratch, each); });
    }
    Event begin(Event::Kind::timing), end(Event::Kind::timing);
    const auto time = [&](Chosen& candidate, int repeats) {
      std::vector<double> times;
      for (int i = -1; i < repeats; ++i) {
        begin.record(stream);
        if (launch_on(scratch, candidate) != CUBLAS_STATUS_SUCCESS) {
          candidate.us = kFailed;
          return;
        }
        end.record(stream);
        gpu::check(cudaStreamSynchronize(stream), "gemm candidate");
        if (i >= 0) times.push_back(microseconds(begin, end));
      }
      std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
      candidate.us = times[size_t(repeats / 2)];
    };
    const auto faster = [](const Chosen& a, const Chosen& b) { return a.us < b.us; };
    for (Chosen& candidate : candidates) time(candidate, 3);
    std::sort(candidates.begin(), candidates.end(), faster);
    candidates.resize(std::min<size_t>(candidates.size(), 4));
    for (Chosen& candidate : candidates) time(candidate, 11);
    const auto best = std::min_element(candidates.begin(), candidates.end(), faster);
    if (best != candidates.end() && best->us < kFailed) return *best;
    if (!simple_gemm_takes(shape)) refuse();
    return simple();
  }

  /// The process's choice, with its kernel loaded here. known_mutex is held.
  std::shared_ptr<const Selected> find_or_choose(const GemmKey& key) {
    if (const auto found = known.find(key); found != known.end()) {
      load(found->second.selected->get());
      found->second.contexts.insert(this_context());
      return found->second.selected;
    }
    std::optional<Chosen> chosen = take_idle();
    const bool is_timed = !chosen;
    if (is_timed) chosen = choose();
    if (is_timed && !is_simple(*chosen)) timed.push_back(key);
    return known.emplace(key, Known{std::make_shared<Selected>(*chosen), {this_context()}, {}})
        .first->second.selected;
  }

  /// Runs the library's first suggestion for these rows, if the choice for others does not.
  cublasStatus_t launch_suggested(const void* px, const void* pw, void* po, const void* bias,
                                  cudaStream_t stream) {
    if (!suggested) {
      const auto found = suggestions();
      if (found.empty() && !simple_gemm_takes(shape)) refuse();
      suggested = found.empty() ? simple() : found[0];
    }
    return launch(*suggested, px, pw, po, bias, stream);
  }
};

LtGemm::LtGemm(const LtContext& context, const GemmShape& shape)
    : LtGemm(context, shape, shape.m, [] {}) {}

LtGemm::LtGemm(const LtContext& context, const GemmShape& shape, int64_t timed_m,
               const std::function<void()>& before) {
  const int64_t step = 16 / int64_t(size_of(shape.in));
  const int64_t x_row = shape.x_is_km ? shape.m : shape.k;
  const int64_t weight_row = shape.weight_is_kn ? shape.n : shape.k;
  if (x_row % step != 0 || weight_row % step != 0 || shape.n % step != 0) {
    throw InvalidArgument(fmt::format(
        "gemm: M {} N {} K {} in {}: rows of x {}, of weight {}: expected multiples of {} (16 "
        "bytes)",
        shape.m, shape.n, shape.k, name_of(shape.in), x_row, weight_row, step));
  }
  const bool fp8 = shape.in == DType::e4m3;
  if (fp8 && shape.weight_is_kn) {
    throw InvalidArgument("gemm: e4m3 weight [K, N]: expected [N, K]");
  }
  if (fp8 && shape.out == DType::f32 && shape.bias) {
    throw Unsupported("gemm: e4m3 to f32 with a bias: cuBLASLt has none of f32");
  }
  if (fp8 ? shape.out != DType::bf16 && shape.out != DType::f16 && shape.out != DType::f32
          : shape.out != shape.in && shape.out != DType::f32) {
    throw InvalidArgument(fmt::format("gemm: out {} from {}: expected {} or f32",
                                      name_of(shape.out), name_of(shape.in),
                                      fp8 ? "bf16, f16" : "the same"));
  }
  state_ = std::make_unique<State>(context, shape);
  state_->set_scale_modes();
  if (nothing_to_do(shape)) return;
  state_->is_exact = timed_m == shape.m;
  GemmShape timed_shape = shape;
  timed_shape.m = timed_m;
  // Ranks of one process share the choice, so all of them run the same algorithm.
  const GemmKey key(this_share()->sms(), timed_shape);
  state_->selected = selected_here(key);
  if (state_->selected) return;
  before();  // may wait for a rank that needs the lock
  const std::lock_guard lock(known_mutex);
  if (state_->is_exact) {
    state_->selected = state_->find_or_choose(key);
    return;
  }
  State with_timed_rows(context, timed_shape);
  with_timed_rows.set_scale_modes();
  state_->selected = with_timed_rows.find_or_choose(key);
}

LtGemm::~LtGemm() = default;
LtGemm::LtGemm(LtGemm&&) noexcept = default;

void LtGemm::run(const void* x, const void* weight, void* out, const void* bias,
                 cudaStream_t stream, const ScalePointers& scales) const {
  if (nothing_to_do(state_->shape)) return;
  if (state_->shape.bias) state_->set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (state_->shape.scaling) state_->set_scales(scales);
  const Chosen chosen = state_->selected->get();
  cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
  if (!state_->suggested) status = state_->launch(chosen, x, weight, out, bias, stream);
  if (status != CUBLAS_STATUS_SUCCESS && !state_->is_exact && !state_->shape.same_bits) {
    status = state_->launch_suggested(x, weight, out, bias, stream);
  }
  check(status, "cublasLtMatmul");
}

void LtGemm::store(const void* x, const void* weight, void* out, cudaStream_t stream) const {
  if (const GemmShape& s = state_->shape; nothing_to_do(s)) {
    const size_t bytes = size_t(s.m * s.n) * size_of(s.out);
    return gpu::check(cudaMemsetAsync(out, 0, bytes, stream), "clear a product");
  }
  check(state_->launch(state_->selected->get(), x, weight, out, nullptr, stream, true),
        "cublasLtMatmul");
}

std::string gemm_choice_prefix() {
  return fmt::format("cublaslt {} | ", cublasLtGetVersion());
}

void keep_gemm_choices(const GemmChoices& choices) {
  const std::lock_guard lock(known_mutex);
  earlier_choices.insert(choices.begin(), choices.end());
}

TimedChoices timed_gemm_choices(size_t first) {
  const std::lock_guard lock(known_mutex);
  TimedChoices result{{}, timed.size()};
  for (size_t i = first; i < timed.size(); ++i) {
    result.choices.emplace(key_of(timed[i]), choice_of(known.at(timed[i]).selected->get()));
  }
  return result;
}

void adopt_gemm_choices(const LtContext& context, const GemmChoices& choices) {
  const auto share = this_share();
  const std::lock_guard lock(known_mutex);
  // Also choices that were read: from a file that another rank has written since.
  for (auto& [key, of_shape] : known) {
    if (key.first != share->sms() || is_simple(of_shape.selected->get())) continue;
    const auto agreed = choices.find(key_of(key));
    if (agreed == choices.end()) continue;
    const bool is_new = agreed->second != choice_of(of_shape.selected->get());
    // A rank of this process that came before has adopted it: only the kernel is missing here.
    if (!is_new && !of_shape.outdated.contains(this_context())) continue;
    LtGemm::State state(context, key.second);
    state.set_scale_modes();
    const std::optional<Chosen> chosen = state.as_chosen(agreed->second);
    if (!chosen) continue;
    state.load(*chosen);
    if (is_new) {
      of_shape.outdated.merge(of_shape.contexts);
      of_shape.contexts.clear();
      of_shape.selected->set(*chosen);
    }
    of_shape.contexts.insert(this_context());
    of_shape.outdated.erase(this_context());
  }
}

}  // namespace tandem::gpu
