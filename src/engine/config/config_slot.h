// Slot of a key: TANDEM_SLOT(train.steps).
#pragma once

#include "engine/config/config.h"

#define TANDEM_SLOT(member) \
  [](::tandem::TrainConfig& config) -> ::tandem::ConfigSlot { return &config.member; }
