// Benchmark description of an overlap operator, in addition to its descriptor and candidates.
// Operators listed here are timed and checked by `tandem bench` and by the tests.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "bench/bench.h"
#include "overlap/contract/operator.h"

namespace tandem {

struct BenchOperator {
  std::string_view name;
  /// Descriptor of this rank's shard of a request, whose sizes are those of the full GEMM.
  std::function<OpDesc(const Communicator&, const BenchRequest&)> describe;
  std::function<std::unique_ptr<OverlapOperator>(Communicator&, const OpDesc&,
                                                 const OverlapOptions&, Choosing)>
      make;
  /// Unfused form, writes operands.out.
  std::function<void(Communicator&, const Operands&)> reference;
  /// Bytes sent by a rank.
  std::function<int64_t(const Communicator&, const OpDesc&)> wire_bytes;
  /// Bare GEMM, on all rows of x: out has this rank's rows of every shard, and the shape of the
  /// operator's own output if that is larger.
  std::function<void(const Tensor& x, const Tensor& weight, const Tensor& out)> gemm;
  bool accumulates = false;  ///< results are added to `out`
  /// Error bound of an element of the result with a wire format, on `ranks` ranks. Null: the
  /// operator is benchmarked without one.
  struct Magnitudes {
    double weight_row;  ///< largest sum of a row's magnitudes; those of x are at most 1
    double partial;     ///< largest of this rank's partial product with all of x
    double expected;    ///< largest of the result
  };
  std::function<double(const OpDesc&, int ranks, const Magnitudes&)> codec_error = {};
};

/// All operators; a test may add one before it starts a world.
std::vector<BenchOperator>& bench_operators();
/// nullptr if there is none of that name.
const BenchOperator* find_bench_operator(std::string_view name);

}  // namespace tandem
