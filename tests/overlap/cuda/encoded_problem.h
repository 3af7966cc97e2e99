// Dense operator over a wire format: its operands, and the results of CPU ranks with the wire
// format and, in f32, without it.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "collectives/rows/row_messages.h"
#include "overlap/ag_gemm/operator.h"
#include "overlap/contract/encoded_candidates.h"
#include "overlap/gemm_ar/operator.h"
#include "overlap/gemm_rs/operator.h"
#include "overlap/registry.h"
#include "tandem/collectives.h"
#include "tandem/overlap.h"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"

namespace tandem::test {

struct EncodedProblem {
  std::string op, wire;
  int64_t m, n, k;  // global shape of the operator
  DType dtype = DType::bf16;

  bool gathers() const { return op == "ag_gemm"; }
  std::string describe() const {
    return fmt::format("{} m {} n {} k {} {} as {}", op, m, n, k, name_of(dtype), wire);
  }
  OpDesc desc(const Communicator& comm, bool allow_uncompressed = false) const {
    const OverlapOptions options{.wire = Wire::parse(wire),
                                 .allow_uncompressed = allow_uncompressed};
    if (gathers()) return encoded(ag_gemm_desc(comm, {m, n, k, dtype}), options);
    if (op == "gemm_rs") return encoded(gemm_rs_desc(comm, {m, n, k, dtype}), options);
    return encoded(gemm_ar_desc(comm, {.m = m, .n = n, .k = k, .dtype = dtype}), options);
  }
  std::unique_ptr<OverlapOperator> make(Communicator& comm,
                                        Strategy strategy = Strategy::automatic) const {
    const OpDesc d = desc(comm);
    return make_operator(*find_operator(op), comm, d, {.strategy = strategy, .wire = d.wire},
                         Choosing::fastest);
  }
  Shard x_rows(int ranks, int rank) const {
    return gathers() ? shard_of(m, ranks, rank) : Shard{0, m};
  }
  int64_t out_rows(int ranks, int rank) const {
    return op == "gemm_rs" ? shard_of(m, ranks, rank).count : m;
  }
  std::vector<float> x(int ranks, int rank) const {
    const Shard rows = x_rows(ranks, rank);
    return values(gathers() ? 100 : 100 + uint64_t(rank), rows.begin * k, rows.count * k);
  }
  std::vector<float> weight(int rank) const { return values(200 + uint64_t(rank), 0, n * k); }
  /// Approximate maximum of |partial product| over k terms.
  double largest() const { return 6 * std::sqrt(double(k)) / 3; }

 private:
  static std::vector<float> values(uint64_t stream, int64_t first, int64_t count) {
    std::vector<float> all(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) all[size_t(i)] = uniform(stream, first + i);
    return all;
  }
};

inline std::vector<float> floats_of(DType dtype, const Bytes& bytes) {
  std::vector<float> all(bytes.size() / size_of(dtype));
  for (size_t i = 0; i < all.size(); ++i) {
    if (dtype == DType::f32) {
      std::memcpy(&all[i], &bytes[4 * i], 4);
      continue;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, &bytes[2 * i], 2);
    all[i] = dtype == DType::bf16 ? BFloat16{bits}.to_float() : Float16{bits}.to_float();
  }
  return all;
}

/// Results of CPU ranks, by rank. `exact`: uncompressed, in f32, of the operands rounded to dtype.
inline std::vector<std::vector<float>> on_cpu_ranks(const EncodedProblem& p, int ranks,
                                                    bool exact) {
  std::vector<std::vector<float>> results(static_cast<size_t>(ranks));
  WorldOptions options;
  options.ranks = ranks;
  run_threads(options, [&](Communicator& comm) {
    const int rank = comm.rank();
    const DType dtype = exact ? DType::f32 : p.dtype;
    const auto stored = [&](const std::vector<float>& values) {
      return stored_as(dtype, floats_of(p.dtype, stored_as(p.dtype, values)));
    };
    Bytes x = stored(p.x(ranks, rank)), weight = stored(p.weight(rank));
    Bytes out(size_t(p.out_rows(ranks, rank) * p.n) * size_of(dtype));
    const Tensor x_tensor(x.data(), dtype, {p.x_rows(ranks, rank).count, p.k}),
        weight_tensor(weight.data(), dtype, {p.n, p.k}),
        out_tensor(out.data(), dtype, {p.out_rows(ranks, rank), p.n});
    OverlapOptions how{.strategy = Strategy::serial};
    if (!exact) how.wire = Wire::parse(p.wire);
    if (p.gathers()) {
      AgGemm(comm, {p.m, p.n, p.k, dtype}, how).run(x_tensor, weight_tensor, out_tensor);
    } else if (p.op == "gemm_rs") {
      GemmRs(comm, {p.m, p.n, p.k, dtype}, how).run(x_tensor, weight_tensor, out_tensor);
    } else {
      GemmAr(comm, {.m = p.m, .n = p.n, .k = p.k, .dtype = dtype}, how)
          .run(x_tensor, weight_tensor, out_tensor);
    }
    results[size_t(rank)] = floats_of(dtype, out);
  });
  return results;
}

struct Difference {
  double largest = 0, root_mean_square = 0;
};
inline Difference between(const std::vector<float>& a, const std::vector<float>& b) {
  Difference of;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(double(a[i]) - double(b[i]));
    if (!(d <= of.largest)) of.largest = d;  // also if d is NaN
    of.root_mean_square += d * d;
  }
  of.root_mean_square = std::sqrt(of.root_mean_square / double(std::max<size_t>(a.size(), 1)));
  return of;
}

}  // namespace tandem::test
