// AllowUncompressed on GPU ranks: encoded only if that is measured to be faster.
#pragma once

#include "tandem/collectives.h"

namespace tandem::gpu {

void all_reduce(Communicator& comm, const Tensor& data, const AllowUncompressed& choice,
                const Tensor* residual);
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out,
                const AllowUncompressed& choice);
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                    const AllowUncompressed& choice, const Tensor* residual);

}  // namespace tandem::gpu
