// Includes all public headers.
#pragma once

#include "tandem/attention.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/cross_attention.h"
#include "tandem/cuda.h"
#include "tandem/dtype.h"
#include "tandem/error.h"
#include "tandem/moe.h"
#include "tandem/norm.h"
#include "tandem/overlap.h"
#include "tandem/quantize.h"
#include "tandem/random.h"
#include "tandem/strategy.h"
#include "tandem/tensor.h"
#include "tandem/version.h"
#include "tandem/world.h"
