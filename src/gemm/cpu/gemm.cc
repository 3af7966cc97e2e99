#include "gemm/gemm.h"

#include <fmt/format.h>
#include <omp.h>
#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "core/cpu/float_mode.h"
#include "core/system/log.h"
#include "core/system/process/fork.h"
#include "gemm/cpu/bf16_gemm.h"
#include "gemm/cpu/dense.h"
#include "gemm/cpu/onednn.h"
#include "gemm/cpu/ordered_gemm.h"
#include "gemm/cpu/tile_gemm.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Dims = dnnl::memory::dims;

[[noreturn]] void reject(const char* operand, const Tensor& tensor, const std::string& expected) {
  throw InvalidArgument(
      fmt::format("gemm: {} is {}: expected {}", operand, tensor.describe(), expected));
}

dnnl::memory::data_type type_of(DType dtype) {
  return dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

/// Strides of a dense matrix, with those of one-element dimensions normalized so that equal layouts
/// have equal keys.
std::array<int64_t, 2> contiguous_strides(const Tensor& t) {
  if (is_row_major(t) && (t.dim(0) == 1 || t.stride(0) == t.dim(1))) return {t.dim(1), 1};
  return {1, t.dim(0)};
}

void check_strides(const char* operand, const Tensor& t) {
  const int64_t rows = t.dim(0), columns = t.dim(1);
  const bool by_rows = (columns == 1 || t.stride(1) == 1) && (rows == 1 || t.stride(0) >= columns);
  const bool by_columns = (rows == 1 || t.stride(0) == 1) && (columns == 1 || t.stride(1) >= rows);
  if (!by_rows && !by_columns && t.elements()) {
    throw InvalidArgument(
        fmt::format("gemm: {} is {} with strides {}, {}: expected one stride of 1 and no overlap",
                    operand, t.describe(), t.stride(0), t.stride(1)));
  }
}

void check(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options) {
  if (a.dims() != 2) reject("a", a, "2 dimensions");
  if (b.dims() != 2) reject("b", b, "2 dimensions");
  if (out.dims() != 2) reject("out", out, "2 dimensions");
  if (a.dtype() != DType::f32 && a.dtype() != DType::bf16) reject("a", a, "f32 or bf16");
  if (b.dtype() != a.dtype()) reject("b", b, fmt::format("the dtype of a, {}", a.describe()));
  if (out.dtype() != DType::f32 && out.dtype() != a.dtype()) {
    reject("out", out, fmt::format("f32 or the dtype of a, {}", a.describe()));
  }
  if (b.dim(0) != a.dim(1))
    reject("b", b, fmt::format("{} rows, as a is {}", a.dim(1), a.describe()));
  if (out.dim(0) != a.dim(0) || out.dim(1) != b.dim(1)) {
    reject("out", out, fmt::format("[{}, {}]", a.dim(0), b.dim(1)));
  }
  if (const Tensor* bias = options.bias) {
    if (bias->dims() != 1 || bias->dim(0) != b.dim(1) || bias->dtype() != out.dtype() ||
        !bias->contiguous()) {
      reject("bias", *bias, fmt::format("{}[{}]", name_of(out.dtype()), b.dim(1)));
    }
  }
  for (const auto& [name, t] : {std::pair{"a", &a}, {"b", &b}, {"out", &out}}) {
    if (t->device().kind != DeviceKind::cpu) reject(name, *t, "a CPU tensor");
    check_strides(name, *t);
  }
}

/// Parameters that a primitive is specialized for.
struct Key {
  int64_t m, n, k;
  std::array<int64_t, 2> a, b, out;
  uint8_t in_type, out_type;
  bool bias, accumulate;
  int32_t threads;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0xcbf29ce484222325ull;
    const auto mix = [&](uint64_t word) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    };
    for (const int64_t dim : {key.m, key.n, key.k, key.a[0], key.a[1], key.b[0], key.b[1],
                              key.out[0], key.out[1], int64_t(key.threads)}) {
      mix(uint64_t(dim));
    }
    mix(uint64_t(key.in_type) << 24 | uint64_t(key.out_type) << 16 | uint64_t(key.bias) << 8 |
        uint64_t(key.accumulate));
    return size_t(hash);
  }
};

/// Max primitives of a thread, each of some 100 KiB of code and descriptors, and of oneDNN's own
/// cache, through which threads share them: else it keeps 1,024 beyond those in use.
constexpr int kMaxProducts = 256;

const dnnl::engine& engine() {
  static const dnnl::engine cpu = [] {
    if (!std::getenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")) {
      dnnl::set_primitive_cache_capacity(kMaxProducts);
    }
    return dnnl::engine(dnnl::engine::kind::cpu, 0);
  }();
  return cpu;
}

struct Product {
  dnnl::matmul primitive;
  dnnl::memory a, b, out, bias, scratchpad;
  std::unordered_map<int, dnnl::memory> arguments;
  size_t scratchpad_bytes = 0;
};

dnnl::matmul::primitive_desc plan_of(const Key& key) {
  const auto in = type_of(DType(key.in_type)), result = type_of(DType(key.out_type));
  const dnnl::memory::desc a({key.m, key.k}, in, Dims(key.a.begin(), key.a.end()));
  const dnnl::memory::desc b({key.k, key.n}, in, Dims(key.b.begin(), key.b.end()));
  const dnnl::memory::desc out({key.m, key.n}, result, Dims(key.out.begin(), key.out.end()));
  const dnnl::memory::desc bias({1, key.n}, result, Dims{key.n, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (key.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  return cpu::matmul_plan(engine(), a, b, key.bias ? &bias : nullptr, out, attributes);
}

/// Throws instead of letting oneDNN end the process if there is no memory for its generated code
/// and its objects, whose constructors run even where none was allocated.
void require_room_for_code() {
  constexpr size_t kRoom = size_t(16) << 20;
  void* room = ::mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) {
    throw Unsupported(
        fmt::format("matrix product: no memory for its code: expected {} MiB more "
                    "than what is in use (ulimit -v shows the limit)",
                    kRoom >> 20));
  }
  ::munmap(room, kRoom);
}

Product make_product(const Key& key) {
  const auto plan = plan_of(key);
  Product product{dnnl::matmul(plan),
                  dnnl::memory(plan.src_desc(), engine(), nullptr),
                  dnnl::memory(plan.weights_desc(), engine(), nullptr),
                  dnnl::memory(plan.dst_desc(), engine(), nullptr),
                  dnnl::memory(plan.bias_desc(), engine(), nullptr),
                  dnnl::memory(plan.scratchpad_desc(), engine(), nullptr),
                  {},
                  plan.scratchpad_desc().get_size()};
  product.arguments = {{DNNL_ARG_SRC, product.a},
                       {DNNL_ARG_WEIGHTS, product.b},
                       {DNNL_ARG_DST, product.out},
                       {DNNL_ARG_SCRATCHPAD, product.scratchpad}};
  if (key.bias) product.arguments.emplace(DNNL_ARG_BIAS, product.bias);
  return product;
}

/// State of one thread, so that rank threads never wait for each other here.
struct ThreadState {
  std::unordered_map<Key, Product, KeyHash> products;
  std::optional<dnnl::stream> stream;  ///< from the first product on
  Memory scratchpad, dense_a, dense_b, dense_out;
};

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

float load(const Tensor& t, int64_t offset) {
  return t.dtype() == DType::f32 ? t.as<float>()[offset] : t.as<BFloat16>()[offset].to_float();
}

void store(const Tensor& t, int64_t offset, float value) {
  if (t.dtype() == DType::f32) {
    t.as<float>()[offset] = value;
  } else {
    t.as<BFloat16>()[offset] = BFloat16::from_float(value);
  }
}

/// K = 0: the sum is empty; only the bias and the old value remain.
void empty_sum(const Tensor& out, const GemmOptions& options) {
  for (int64_t i = 0; i < out.dim(0); ++i) {
    for (int64_t j = 0; j < out.dim(1); ++j) {
      const int64_t at = i * out.stride(0) + j * out.stride(1);
      const float old = options.accumulate ? load(out, at) : 0.0f;
      store(out, at, old + (options.bias ? load(*options.bias, j) : 0.0f));
    }
  }
}

void multiply(ThreadState& state, const Tensor& a, const Tensor& b, const Tensor& out,
              const GemmOptions& options);

/// Multiplies `a` padded with rows of zeros, whose results are discarded.
void multiply_padded(ThreadState& state, const Tensor& a, const Tensor& b, const Tensor& out,
                     const GemmOptions& options, int64_t rows) {
  const Memory a_memory(size_t(rows * a.dim(1)) * size_of(a.dtype()));
  const Memory out_memory(size_t(rows * out.dim(1)) * size_of(out.dtype()));
  std::memset(a_memory.data(), 0, a_memory.bytes());
  std::memset(out_memory.data(), 0, out_memory.bytes());
  const Tensor tall_a = a_memory.view(a.dtype(), {rows, a.dim(1)});
  const Tensor tall_out = out_memory.view(out.dtype(), {rows, out.dim(1)});
  copy_matrix(a, tall_a.rows(0, a.dim(0)));
  const Tensor result = tall_out.rows(0, out.dim(0));
  if (options.accumulate) copy_matrix(out, result);
  multiply(state, tall_a, b, tall_out, options);
  copy_matrix(result, out);
}

/// All operands are dense, out is row-major and no dimension is 0.
void multiply(ThreadState& state, const Tensor& a, const Tensor& b, const Tensor& out,
              const GemmOptions& options) {
  if (a.dtype() == DType::bf16 && !cpu::has_bf16_products()) {
    const auto in_f32 = [](const Tensor& wide_a, const Tensor& wide_b, const Tensor& wide_out,
                           const GemmOptions& o) {
      multiply(thread_state(), wide_a, wide_b, wide_out, o);
    };
    return cpu::widened_gemm(a, b, out, options, in_f32);
  }
  if (a.dtype() == DType::f32 && cpu::has_ordered_products()) {
    return cpu::ordered_gemm(a, b, out, options);
  }
  if (a.dtype() == DType::bf16 && cpu::has_tile_products()) {
    return cpu::tile_gemm(a, b, out, options);
  }
  // Version 3 blocks a long K differently for a single row.
  constexpr int64_t kMinRows = DNNL_VERSION_MAJOR >= 3 ? 2 : 1;
  if (a.dim(0) < kMinRows) return multiply_padded(state, a, b, out, options, kMinRows);
  const Key key{a.dim(0),
                b.dim(1),
                a.dim(1),
                contiguous_strides(a),
                contiguous_strides(b),
                contiguous_strides(out),
                uint8_t(a.dtype()),
                uint8_t(out.dtype()),
                options.bias != nullptr,
                options.accumulate,
                omp_get_max_threads()};
  auto found = state.products.find(key);
  if (found == state.products.end()) {
    if (state.products.size() >= size_t(kMaxProducts)) state.products.clear();
    require_room_for_code();
    if (!state.stream) state.stream.emplace(engine());
    found = state.products.emplace(key, make_product(key)).first;
  }
  Product& product = found->second;
  if (state.scratchpad.bytes() < product.scratchpad_bytes) {
    state.scratchpad = Memory(product.scratchpad_bytes);
  }
  product.a.set_data_handle(a.data());
  product.b.set_data_handle(b.data());
  product.out.set_data_handle(out.data());
  product.scratchpad.set_data_handle(state.scratchpad.data());
  if (options.bias) product.bias.set_data_handle(options.bias->data());
  cpu::reset_team();
  product.primitive.execute(*state.stream, product.arguments);
}

}  // namespace

void gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options) {
  check(a, b, out, options);
  const auto [name, tile] = product_label();
  const ScopedSpan span(SpanKind::gemm, name, tile);
  if (out.elements() == 0) return;
  if (a.dim(1) == 0) return empty_sum(out, options);
  ThreadState& state = thread_state();
  const Tensor left = dense_copy(a, state.dense_a), right = dense_copy(b, state.dense_b);
  if (is_dense(out) && is_row_major(out)) {
    multiply(state, left, right, out, options);
  } else if (is_dense(out) && !options.bias) {
    multiply(state, right.transposed(), left.transposed(), out.transposed(), options);
  } else {
    const Tensor result = row_major_copy(out, state.dense_out, options.accumulate);
    multiply(state, left, right, result, options);
    copy_matrix(result, out);
  }
}

bool rows_keep_bits() {
  return cpu::has_ordered_products() ||
         (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
}

void set_kernel_threads(int threads) {
  if (threads < 1) {
    throw InvalidArgument(fmt::format("kernel threads {}: expected at least 1", threads));
  }
  if (lost_its_team() && threads > 1) {
    static std::once_flag noted;
    std::call_once(noted, [&] {
      log_message(LogLevel::warn,
                  fmt::format("a forked child computes with 1 thread, not {}: the parent had "
                              "threads, which a fork does not copy (spawn has all)",
                              threads));
    });
    threads = 1;
  }
  omp_set_num_threads(threads);
}

int kernel_threads() {
  return omp_get_max_threads();
}

}  // namespace tandem
