// Bootstrap by MPI, which is initialised when the first run begins and finalised at process exit,
// unless the caller did the first and so does the second. The communication thread makes every MPI
// call.
#pragma once

#include "comm/mpi/api.h"

#include "comm/processes/bootstrap.h"
#include "comm/processes/engine.h"

namespace tandem::mpi {

class MpiBootstrap final : public processes::Bootstrap {
 public:
  /// The ranks are those of `base`, of which a duplicate is kept. `engine` leaves before the
  /// caller's MPI_Finalize does anything else.
  MpiBootstrap(processes::Engine& engine, MPI_Comm base);

  MPI_Comm comm() const { return comm_; }
  std::string_view transport() const override { return "mpi"; }
  bool has_fabric() const override;
  std::unique_ptr<processes::Wire> own_wire(processes::WireSink& sink,
                                            processes::Waker& waker) override;
  void failed(const std::exception& error) override;
  void end() override;
  bool must_end_together() const override { return owns_mpi_; }

 private:
  void gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all,
                    std::string_view what) override;

  MPI_Comm comm_ = MPI_COMM_NULL;
  bool owns_mpi_ = false;  ///< initialised by this
};

/// This process's end of the MPI world: the ranks of `base` at the first call.
processes::Engine& engine(MPI_Comm base = MPI_COMM_WORLD);
/// What the world of `engine()` sends its own calls of MPI over.
MPI_Comm comm_of(const processes::Engine& engine);

}  // namespace tandem::mpi
