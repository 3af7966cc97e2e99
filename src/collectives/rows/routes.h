// Collectives over a wire format, by a route given by the caller or the tuner.
#pragma once

#include "collectives/call.h"

namespace tandem::collectives {

/// Checks of an encoded call that throw before anything is sent, whatever route it then takes.
void check_all_reduce(const Communicator& comm, const Tensor& data, const Wire& wire,
                      const Tensor* residual);
void check_all_gather(const Communicator& comm, const Tensor& shard, const Tensor& out,
                      const Wire& wire);
void check_reduce_scatter(const Communicator& comm, const Tensor& data, const Tensor& shard,
                          const Wire& wire, const Tensor* residual);

/// Run after the check, on two ranks or more. Route `uncompressed` does not change a residual:
/// nothing is lost.
void run_all_reduce(Communicator& comm, const Tensor& data, const Wire& wire,
                    const Tensor* residual, Route route);
void run_all_gather(Communicator& comm, const Tensor& shard, const Tensor& out, const Wire& wire,
                    Route route);
void run_reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                        const Wire& wire, const Tensor* residual, Route route);

/// Original request of an uncompressed call, carried in its arguments if the tuner chose this
/// route.
struct RequestedCall {
  Wire wire;
  Route route = Route::given;
};
void uncompressed_all_reduce(Communicator& comm, const Tensor& data, ReduceOp op,
                             const RequestedCall& asked);
void uncompressed_all_gather(Communicator& comm, const Tensor& shard, const Tensor& out,
                             const RequestedCall& asked);
void uncompressed_reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                                 ReduceOp op, const RequestedCall& asked);

}  // namespace tandem::collectives
