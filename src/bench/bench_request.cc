#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "bench/bench_collective.h"
#include "bench/bench_moe.h"
#include "bench/engine/bench_prefill.h"
#include "core/system/machine.h"
#include "overlap/registry.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Lower bound of one rank's memory. In floating point, which does not overflow. Collectives on CPU
/// ranks are checked against all ranks' data.
double min_bytes(const BenchRequest& request, int ranks, bool on_gpus) {
  const auto m = double(request.m), n = double(request.n), k = double(request.k);
  const bool gemm = is_gemm(request.op);
  if (is_moe(request.op)) {
    const auto& moe = request.moe;
    const double weights = 3 * moe.experts * n * k / ranks;
    const double slots = m * moe.top_k * moe.tp / ranks;
    return (weights + slots * (2 * k + 3 * n)) * double(size_of(request.dtype)) *
           (moe.backward ? 3 : 1);
  }
  if (is_prefill(request.op)) {  // weights in f32, keys and values, rows
    const double weights = double(request.layers) * (4 * k * k + 3 * n * k) / ranks;
    const double cached = 2 * double(request.layers) * m * k / ranks;
    return 4 * (weights + cached) + 2 * m * (k + (3 * k + 3 * n) / ranks) * 4;
  }
  const OperatorRow* row = find_operator(request.op);
  const bool gathers = row && row->collective == Collective::all_gather;
  const double elements = !gemm     ? (on_gpus ? 1 + 1. / ranks : ranks) * m * n
                          : gathers ? m * k + (n * k + m * n) / ranks
                                    : m * n + (n * k + m * k) / ranks;
  return elements * double(size_of(request.dtype));
}

/// `memory`: 0 if unknown.
void check_memory(const BenchRequest& request, int ranks, double bytes, double memory,
                  std::string_view whose) {
  if (memory <= 0 || bytes <= memory) return;
  throw InvalidArgument(fmt::format(
      "bench: {} of m {} n {} k {} on {} ranks: its matrices need {:.3g} GB: expected "
      "at most {} {:.3g} GB",
      request.op, request.m, request.n, request.k, ranks, bytes / 1e9, whose, memory / 1e9));
}

void check_prefill(const BenchRequest& request, int ranks) {
  if (ranks == 1) {
    throw InvalidArgument("bench: prefill on 1 rank, which sends nothing: expected 2 or more");
  }
  if (request.k % (kPrefillHeadDim * ranks) != 0) {
    throw InvalidArgument(
        fmt::format("bench: prefill: k {} on {} ranks: expected a multiple of {} x ranks",
                    request.k, ranks, kPrefillHeadDim));
  }
  if (request.layers < 1 || request.n < ranks) {
    throw InvalidArgument(fmt::format(
        "bench: prefill: n {} and {} layers on {} ranks: expected n of at least the ranks, and a "
        "layer",
        request.n, request.layers, ranks));
  }
}

}  // namespace

std::vector<std::string> bench_ops() {
  std::vector<std::string> ops;
  for (const OperatorRow* row : operators()) ops.emplace_back(row->name);
  for (const BenchMoeOp& moe : kBenchMoeOps) ops.emplace_back(moe.name);
  if (has_prefill()) ops.emplace_back("prefill");
  for (const BenchCollective& collective : kBenchCollectives) ops.emplace_back(collective.name);
  return ops;
}

bool is_gemm(std::string_view op) {
  return find_operator(op) != nullptr || is_moe(op) || is_prefill(op);
}

bool is_moe(std::string_view op) {
  return find_moe(op) != nullptr;
}

BenchData data_of(const BenchRequest& request) {
  const bool depends = request.wire.codec == Codec::lossless && !is_gemm(request.op);
  return depends ? BenchData::normal : BenchData::uniform;
}

bool only_moves(std::string_view op) {
  const BenchCollective* collective = find_collective(op);
  return collective && collective->only_moves;
}

void check_bench(const BenchRequest& request, int ranks) {
  const auto& [op, m, n, k, dtype, chunks, repeats, timeline, scaling, add_norm, wire, moe, layers,
               library] = request;
  const auto ops = bench_ops();
  if (std::find(ops.begin(), ops.end(), op) == ops.end()) {
    throw InvalidArgument(
        fmt::format("bench: operator '{}': expected one of {}", op, fmt::join(ops, ", ")));
  }
  if (m < 1 || n < 1 || k < 1 || repeats < 1 || ranks < 1) {
    throw InvalidArgument(fmt::format(
        "bench: m {} n {} k {} repeats {} ranks {}: expected at least 1", m, n, k, repeats, ranks));
  }
  wire.check();
  const OperatorRow* row = find_operator(op);
  const BenchCollective* collective = find_collective(op);
  const bool takes_wire = row          ? row->codec_error != nullptr
                          : collective ? collective->takes_wire
                                       : true;
  if (!wire.is_none() && !takes_wire) {
    throw InvalidArgument(
        fmt::format("bench: codec '{}' with {}: expected ag_gemm, gemm_rs, gemm_ar, moe, "
                    "moe_dispatch_gemm, moe_gemm_combine, prefill, all_reduce, all_gather, "
                    "reduce_scatter or all_to_all",
                    wire.describe(), op));
  }
  if (!wire.is_none() && is_moe(op) && moe.backward) {
    throw InvalidArgument(fmt::format(
        "bench: codec '{}' with --backward, which is sent uncompressed: expected one of the two",
        wire.describe()));
  }
  if (add_norm && !wire.is_none()) {
    throw InvalidArgument(
        fmt::format("bench: codec '{}' with --add-norm: expected one of the two", wire.describe()));
  }
  if (add_norm && !(row && row->add_norm)) {
    throw InvalidArgument(fmt::format("bench: --add-norm with {}: expected gemm_ar", op));
  }
  if (is_prefill(op)) check_prefill(request, ranks);
  if (dtype != DType::f32 && dtype != DType::bf16) {
    throw InvalidArgument(
        fmt::format("bench: dtype {}: expected f32 or bf16{}", name_of(dtype),
                    dtype == DType::e4m3 || dtype == DType::f16 ? " on CPU ranks" : ""));
  }
  check_memory(request, ranks, min_bytes(request, ranks, false) * ranks_here(ranks),
               double(this_machine().memory_bytes), "this machine's");
}

void check_gpu_memory(const BenchRequest& request, int ranks, double memory) {
  check_memory(request, ranks, min_bytes(request, ranks, true), memory, "a GPU's");
}

}  // namespace tandem
