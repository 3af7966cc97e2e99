// What the benchmark knows of an overlap operator beside its descriptor and its candidates. An
// operator that is listed here is timed and checked by `tandem bench` and by the tests.
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
  /// This rank's part of a request, whose sizes are those of the whole product.
  std::function<OpDesc(const Communicator&, const BenchRequest&)> describe;
  std::function<std::unique_ptr<OverlapOperator>(Communicator&, const OpDesc&,
                                                 const OverlapOptions&, Choosing)>
      make;
  /// The unfused form, into operands.out.
  std::function<void(Communicator&, const Operands&)> reference;
  /// Bytes that a rank sends.
  std::function<int64_t(const Communicator&, const OpDesc&)> wire_bytes;
  /// The product alone, of all rows of x: out has this rank's rows of every shard, and the shape of
  /// the operator's own output where that is larger.
  std::function<void(const Tensor& x, const Tensor& weight, const Tensor& out)> gemm;
  bool accumulates = false;  ///< results are added to `out`
  /// With a wire format: what it may cost an element of the result, on so many ranks. None: the
  /// benchmark does not take one.
  struct Magnitudes {
    double weight_row;  ///< the largest sum of a row's magnitudes; those of x are at most 1
    double partial;     ///< the largest of this rank's product of all of x
    double expected;    ///< of the result
  };
  std::function<double(const OpDesc&, int ranks, const Magnitudes&)> codec_error = {};
};

/// All of them; a test may add one before it starts a world.
std::vector<BenchOperator>& bench_operators();
/// nullptr where there is none of that name.
const BenchOperator* find_bench_operator(std::string_view name);

}  // namespace tandem
