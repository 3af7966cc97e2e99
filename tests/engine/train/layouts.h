// Training runs of configs/tiny.toml and similar on a layout: on threads, or under mpirun on its
// processes.
#pragma once

#include <string>
#include <vector>

#include "engine/data/corpus.h"
#include "engine/train/trainer.h"

namespace tandem {

/// The world under mpirun; else nullptr.
extern Communicator* mpi_world;

struct Layout {
  int tp, dp;
};
/// tp 1, 2, 4 by dp 1, 2; under mpirun those that match its ranks.
std::vector<Layout> layouts();

/// `config`: a name in configs/.
TrainRequest request_for(Layout layout, const std::string& out,
                         const std::vector<std::string>& overrides = {},
                         const std::string& config = "tiny.toml");
TrainEnd run_on_threads(const TrainRequest& request);
TrainEnd run_layout(TrainRequest request);
bool is_root();

/// Losses in OUT/metrics.jsonl, whose steps count from 1.
std::vector<double> losses(const std::string& out);
void expect_close(const std::vector<double>& got, const std::vector<double>& expected);

}  // namespace tandem
