// cublasmp OP FILE REPEATS MxNxK...: NVIDIA's cuBLASMp on the cases of `tandem bench OP --shapes
// MxNxK...`, one process per GPU (torchrun --no-python, mpirun or srun), bf16, measured and checked
// as ours. OP: ag_gemm, gemm_rs or gemm_ar. Rank 0 writes FILE, a list of results.
//
// Requests only algorithms without NVLink multicast. cuBLASMp treats a request as a hint; rejected
// ones are omitted. Built by tools/peer_cublasmp.sh; needs NCCL 2.29.2 or later.
#include <cublasmp.h>
#include <fmt/format.h>

#include <cmath>
#include <ctime>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/cuda/verify.h"
#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/dense.h"
#include "tandem/cuda.h"
#include "tune/cuda/measure.h"

using namespace tandem;
using namespace tandem::gpu;

namespace {

constexpr uint64_t kSeed = 20261121, kX = 100, kW = 200;
constexpr int64_t kSamples = 8192;

void check_mp(cublasMpStatus_t status, const char* what) {
  if (status != CUBLASMP_STATUS_SUCCESS) {
    throw DeviceError(fmt::format("cuBLASMp: {}: status {}", what, int(status)));
  }
}

struct Case {
  std::string op;
  int64_t m, n, k;
};

// Matrix distributed over the ranks along one dimension, column-major: our row-major [rows,
// columns] is its [columns, rows].
struct Spread {
  int64_t rows, columns, row_block, column_block, leading;
  bool by_rows;
};

class Matmul {
 public:
  Matmul(GpuCommunicator& comm, const Case& c, cublasMpMatmulAlgoType_t algorithm)
      : c_(c), stream_(comm.stream()) {
    const int64_t ranks = comm.size(), m = c.m, n = c.n, k = c.k;
    check_mp(cublasMpCreate(&handle_, stream_), "create");
    check_mp(cublasMpGridCreate(ranks, 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR, comm.nccl(), &tall_),
             "grid");
    check_mp(cublasMpGridCreate(1, ranks, CUBLASMP_GRID_LAYOUT_ROW_MAJOR, comm.nccl(), &wide_),
             "grid");
    check_mp(cublasMpMatmulDescriptorCreate(&matmul_, CUBLAS_COMPUTE_32F), "descriptor");
    set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, CUBLAS_OP_T);
    set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, CUBLAS_OP_N);
    set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE, algorithm);
    if (c.op == "ag_gemm") {
      weight_ = describe({k, n, k, n / ranks, k, false});
      x_ = describe({k, m, k, m / ranks, k, false});
      out_ = describe({n, m, n / ranks, m / ranks, n / ranks, true});
    } else {
      weight_ = describe({k, n, k / ranks, n, k / ranks, true});
      if (c.op == "gemm_rs") {
        x_ = describe({k, m, k / ranks, m / ranks, k / ranks, true});
        out_ = describe({n, m, n, m / ranks, n, false});
        set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE, CUDA_R_16BF);
      } else {
        x_ = describe({k, m, k / ranks, m, k / ranks, true});
        out_ = describe({n, m * ranks, n, m, n, false});
        set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE);
      }
    }
  }
  ~Matmul() {
    if (memory_) {
      cublasMpBufferDeregister(wide_, memory_);
      cublasMpFree(tall_, memory_);
    }
    for (const auto descriptor : {x_, weight_, out_}) cublasMpMatrixDescriptorDestroy(descriptor);
    cublasMpMatmulDescriptorDestroy(matmul_);
    cublasMpGridDestroy(wide_);
    cublasMpGridDestroy(tall_);
    cublasMpDestroy(handle_);
  }
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  /// True if the library supports the case; collective, as run() is.
  bool prepare(const Tensor& x, const Tensor& weight, const Tensor& out) {
    size_t device_bytes = 0, host_bytes = 0;
    const auto status = cublasMpMatmul_bufferSize(
        handle_, matmul_, c_.n, c_.m, c_.k, &one_, weight.data(), 1, 1, weight_, x.data(), 1, 1, x_,
        &zero_, nullptr, 1, 1, nullptr, out.data(), 1, 1, out_, &device_bytes, &host_bytes);
    if (status == CUBLASMP_STATUS_NOT_SUPPORTED) return false;
    check_mp(status, "workspace size");
    bytes_ = std::max<size_t>(device_bytes, 256);
    check_mp(cublasMpMalloc(tall_, &memory_, bytes_), "workspace");
    check_mp(cublasMpBufferRegister(wide_, memory_, bytes_), "register the workspace");
    host_.resize(host_bytes);
    return true;
  }

  cublasMpStatus_t run(const Tensor& x, const Tensor& weight, const Tensor& out) {
    return cublasMpMatmul(handle_, matmul_, c_.n, c_.m, c_.k, &one_, weight.data(), 1, 1, weight_,
                          x.data(), 1, 1, x_, &zero_, nullptr, 1, 1, nullptr, out.data(), 1, 1,
                          out_, memory_, bytes_, host_.data(), host_.size());
  }

 private:
  template <class T>
  void set(cublasMpMatmulDescriptorAttribute_t attribute, T value) {
    check_mp(cublasMpMatmulDescriptorSetAttribute(matmul_, attribute, &value, sizeof value),
             "attribute");
  }
  cublasMpMatrixDescriptor_t describe(const Spread& s) const {
    cublasMpMatrixDescriptor_t descriptor = nullptr;
    check_mp(cublasMpMatrixDescriptorCreate(s.rows, s.columns, s.row_block, s.column_block, 0, 0,
                                            s.leading, CUDA_R_16BF, s.by_rows ? tall_ : wide_,
                                            &descriptor),
             "matrix");
    return descriptor;
  }

  Case c_;
  cudaStream_t stream_;
  float one_ = 1, zero_ = 0;
  cublasMpHandle_t handle_ = nullptr;
  cublasMpGrid_t tall_ = nullptr, wide_ = nullptr;
  cublasMpMatmulDescriptor_t matmul_ = nullptr;
  cublasMpMatrixDescriptor_t x_ = nullptr, weight_ = nullptr, out_ = nullptr;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  std::vector<std::byte> host_;
};

nlohmann::json measure(GpuCommunicator& comm, Stopwatch& stopwatch, const Case& c, int repeats) {
  const int ranks = comm.size();
  const auto rank = uint64_t(comm.rank());
  const bool gathers = c.op == "ag_gemm";
  const int64_t n = gathers ? c.n / ranks : c.n, k = gathers ? c.k : c.k / ranks;
  const Shard local = shard_of(c.m, ranks, comm.rank());
  const int64_t x_rows = gathers ? local.count : c.m,
                out_rows = c.op == "gemm_rs" ? local.count : c.m;
  const cudaStream_t stream = comm.stream();
  const Scratch x({DType::bf16, x_rows, k}), w({DType::bf16, n, k}),
      out({DType::bf16, out_rows, n}), whole_x({DType::bf16, c.m, k}),
      whole_out({DType::bf16, c.m, n});
  const uint64_t x_stream = gathers ? kX : kX + rank;
  fill_uniform(x.tensor, kSeed, x_stream, gathers ? local.begin * k : 0, stream);
  fill_uniform(whole_x.tensor, kSeed, x_stream, 0, stream);
  fill_uniform(w.tensor, kSeed, kW + rank, 0, stream);
  const ProductReference reference =
      gathers
          ? ProductReference{kSeed, kX, kW + rank, 1, k, 0, DType::bf16}
          : ProductReference{kSeed,       kX,   kW, ranks, k, c.op == "gemm_rs" ? local.begin : 0,
                             DType::bf16, ranks};
  const ScaledGemm gemm(lt_context(comm), {c.m, n, k, DType::bf16, DType::bf16, false, false, {}});
  std::vector<BoundCandidate> alternatives{{.name = "gemm", .run = [&] {
                                              gemm.run(whole_x.tensor.data(), w.tensor.data(),
                                                       whole_out.tensor.data(), nullptr, stream);
                                            }}};
  const std::map<std::string, cublasMpMatmulAlgoType_t> algorithms{
      {"split_p2p", CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P},
      {"atomic_p2p", CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_P2P},
      {"no_overlap", CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP}};
  std::vector<std::unique_ptr<Matmul>> all;
  std::vector<std::string> refused;
  double worst = 0;
  for (const auto& [name, algorithm] : algorithms) {
    auto matmul = std::make_unique<Matmul>(comm, c, algorithm);
    poison(out.tensor, stream);
    const bool taken = matmul->prepare(x.tensor, w.tensor, out.tensor) &&
                       matmul->run(x.tensor, w.tensor, out.tensor) == CUBLASMP_STATUS_SUCCESS;
    comm.synchronize();
    const auto anywhere = comm.slowest(std::vector<double>{taken ? 0.0 : 1.0});
    if (anywhere[0] > 0) {
      refused.push_back(name);
      continue;
    }
    const Verdict verdict = verify_product(out.tensor, reference, kSamples, stream);
    worst = std::max({worst, verdict.of_bound, verdict.not_finite > 0 ? INFINITY : 0.0});
    all.push_back(std::move(matmul));
    alternatives.push_back({.name = name, .run = [&, matmul = all.back().get()] {
                              check_mp(matmul->run(x.tensor, w.tensor, out.tensor), "matmul");
                            }});
  }
  const auto times = stopwatch.measure(alternatives, {.repeats = repeats});
  worst = comm.slowest(std::vector<double>{worst})[0];
  nlohmann::json us, host;
  for (size_t i = 0; i < alternatives.size(); ++i) {
    us[alternatives[i].name] = std::round(times[i].median_us * 10) / 10;
    host[alternatives[i].name] = std::round(times[i].host_us * 10) / 10;
  }
  int nccl = 0;
  ncclGetVersion(&nccl);
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return {{"peer", "cuBLASMp 0.10"},
          {"op", c.op},
          {"m", c.m},
          {"n", c.n},
          {"k", c.k},
          {"ranks", ranks},
          {"dtype", "bf16"},
          {"time_us", us},
          {"host_us", host},
          {"refused", refused},
          {"nccl", nccl},
          {"max_of_bound", worst},
          {"repeats", repeats},
          {"date", date}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: cublasmp ag_gemm|gemm_rs|gemm_ar FILE REPEATS MxNxK...\n";
    return 2;
  }
  try {
    const std::string op = argv[1];
    const int repeats = std::stoi(argv[3]);
    run_gpus({1, {}, 60.0}, [&](Communicator& any) {
      GpuCommunicator& comm = as_gpu(any);
      Stopwatch stopwatch(comm);
      nlohmann::json results = nlohmann::json::array();
      for (int i = 4; i < argc; ++i) {
        Case c{op, 0, 0, 0};
        if (std::sscanf(argv[i], "%ldx%ldx%ld", &c.m, &c.n, &c.k) != 3) {
          throw InvalidArgument(fmt::format("shape {}: expected MxNxK", argv[i]));
        }
        results.push_back(measure(comm, stopwatch, c, repeats));
        if (comm.rank() != 0) continue;
        std::cout << op << ' ' << argv[i] << ' ' << results.back()["time_us"].dump() << " of bound "
                  << results.back()["max_of_bound"] << std::endl;
        std::ofstream(argv[2]) << results.dump(1) << '\n';
      }
    });
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
