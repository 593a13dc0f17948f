// The verification rules, one line each.
#pragma once
#include "rules/match.h"
