#!/bin/bash
# Packs trained drafters and a corpus as they come with the package: recipes/pack_shipped.sh TRAINED OUT DATA [NAME...]
# TRAINED has a folder for each drafter, in int8. DATA are dialogues that tell where rounding costs least; those of the
# shipped ones are the shards 20 and 21 of recipes/corpus_dialogues.py. FastEagle needs a packed EAGLE-3 in OUT.
set -eu
[ $# -ge 3 ] || { echo "expected TRAINED OUT DATA [NAME...]: recipes/pack_shipped.sh TRAINED OUT DATA" >&2 && exit 2; }
trained=$1 out=$2 data=$3 && shift 3
[ $# -gt 0 ] || set -- eagle3 fasteagle medusa glide draft_model

pack() { # NAME DRAFTER RISE OPTIONS...
  local name=$1 drafter=$2 rise=$3 && shift 3
  specengine train --drafter "$drafter" --target smollm2-135m --start "$trained/$name" --out "$out/$name" --data "$data" \
    --tokens 20000 --held-out 8 --rows 1024 --store none --epochs 0 --keep-vocabulary --storage packed --rise "$rise" "$@"
}

for name; do
  case $name in
    eagle3) pack eagle3 eagle3,levels=5 0.0009 ;;
    fasteagle)
      parts=fasteagle,levels=3,entry=concat,head=own,start=entry,markov=64,cross_entropy=1,feature=0,decay=2
      pack fasteagle $parts 0.01 --base ../eagle3
      ;;
    medusa) pack medusa medusa,heads=4 0.006 ;;
    glide) pack glide glide,layers=1 0.0015 --base smollm2-135m ;;
    draft_model) pack draft_model draft-model,layers=4 0.001 --base smollm2-135m ;;
    *) echo "NAME: unknown drafter $name" >&2 && exit 2 ;;
  esac
done
