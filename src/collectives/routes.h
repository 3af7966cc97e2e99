// The collectives over a wire format, by the route that their caller or the tuner says.
#pragma once

#include "collectives/call.h"

namespace tandem::collectives {

/// What throws before anything is sent. Of an encoded call, whatever route it then takes.
void check_all_reduce(const Communicator& comm, const Tensor& data, const Wire& wire,
                      const Tensor* residual);
void check_all_gather(const Communicator& comm, const Tensor& shard, const Tensor& out,
                      const Wire& wire);
void check_reduce_scatter(const Communicator& comm, const Tensor& data, const Tensor& shard,
                          const Wire& wire, const Tensor* residual);

/// On two ranks or more, after the check. `plain` leaves a residual alone: nothing is lost.
void run_all_reduce(Communicator& comm, const Tensor& data, const Wire& wire,
                    const Tensor* residual, Route route);
void run_all_gather(Communicator& comm, const Tensor& shard, const Tensor& out, const Wire& wire,
                    Route route);
void run_reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                        const Wire& wire, const Tensor* residual, Route route);

/// Without a wire format. What was asked for is in the arguments, where the tuner chose this.
struct Asked {
  Wire wire;
  Route route = Route::given;
};
void plain_all_reduce(Communicator& comm, const Tensor& data, ReduceOp op, const Asked& asked);
void plain_all_gather(Communicator& comm, const Tensor& shard, const Tensor& out,
                      const Asked& asked);
void plain_reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard, ReduceOp op,
                          const Asked& asked);

}  // namespace tandem::collectives
